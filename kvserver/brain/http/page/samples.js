// What the server said over the last hour, and what happened between two of its answers. Counters only grow while a
// brain lives, so every rate is a difference of two samples over the brain's own time.

const KEPT_MS = 3700_000; // an hour, and what the oldest of its bins begins with
const FINE_MS = 400_000; // so long every sample is kept, then one in COARSE_MS
const COARSE_MS = 10_000;
const BINS = 60;

const samples = []; // oldest first: {ms, incarnation, uptime_s, counts}

function keep(status, ms) {
  const counts = { ...flat("", status.counters), ...flat("trouble.", status.troubles) };
  for (const disk of status.disks) {
    counts[`disk.${disk.device}.read`] = disk.read_bytes;
    counts[`disk.${disk.device}.written`] = disk.written_bytes;
  }
  for (const remote of status.other_remotes.length ? remotesOf(status) : []) {
    for (const [name, value] of Object.entries(remote.counted)) counts[`remote.${remote.name}.${name}`] = value;
  }
  samples.push({ ms, incarnation: status.incarnation, uptime_s: status.uptime_s, counts });
  if (samples[0].ms < ms - KEPT_MS) samples.shift();
  const fine = samples.findIndex((sample) => sample.ms > ms - FINE_MS);
  if (fine > 1 && samples[fine - 1].ms - samples[fine - 2].ms < COARSE_MS) samples.splice(fine - 1, 1);
}

function remotesOf(status) {
  return status.remote ? [status.remote, ...status.other_remotes] : [];
}

function flat(before, table) {
  const found = {};
  for (const [name, value] of Object.entries(table)) {
    if (typeof value === "number") found[before + name] = value;
    else Object.assign(found, flat(`${before}${name}.`, value));
  }
  return found;
}

/** The last sample at or before that time; undefined when there is none. */
function sampleAt(ms) {
  let low = 0;
  for (let high = samples.length; low < high; ) {
    const middle = (low + high) >> 1;
    if (samples[middle].ms <= ms) low = middle + 1;
    else high = middle;
  }
  return samples[low - 1];
}

/** What happened between two samples of one brain. */
class Between {
  constructor(from, to) {
    const known = from && to && from.incarnation === to.incarnation;
    this.seconds = known ? to.uptime_s - from.uptime_s : 0;
    this.from = known ? from.counts : {};
    this.to = known ? to.counts : {};
  }
  grown(name) {
    return (this.to[name] ?? 0) - (this.from[name] ?? 0);
  }
  perS(name) {
    return this.seconds > 0 ? this.grown(name) / this.seconds : 0;
  }
}

/** The last so many seconds, or what this page has seen of them from the brain that lives now. */
function lately(seconds) {
  const last = samples.at(-1);
  const first = samples.find((sample) => sample.incarnation === last.incarnation);
  const from = sampleAt(last.ms - 1000 * seconds);
  return new Between(from && from.ms > first.ms ? from : first, last);
}

/** BINS pieces of the last so many seconds, at times that do not move; the last one is still filling. */
function bins(seconds) {
  const step = (1000 * seconds) / BINS;
  const end = Math.floor(samples.at(-1).ms / step) + 1;
  return Array.from({ length: BINS }, (_, at) => {
    const ms = (end - BINS + at) * step;
    return { ms, until: ms + step, seen: new Between(sampleAt(ms) ?? samples[0], sampleAt(ms + step)) };
  });
}

// What the page shows of one status document and of the samples before it.

const NOW_S = 5; // what "now" is measured over
const RESULTS = [
  ["dram", "DRAM"],
  ["disk", "disk"],
  ["declined", "declined: on disk, slower than computing"],
  ["unwanted", "unwanted: held, engines have them"],
  ["miss", "miss"],
];
const ENDS = {
  whole: "prefix: all that was asked is held",
  absent: "prefix: never stored, or left long ago",
  gone: "prefix: the next chunk left lately",
  writing: "prefix: the next chunk is being stored",
  partial: "prefix: a window or state group is missing",
  declined: "prefix: the rest is on disk, slower than computing",
  "disk-away": "prefix: the rest is on disk, which is away",
  namespace: "prefix: nobody registered this namespace",
  recovering: "prefix: not known yet what is on disk",
};
const EVICTED = {
  store: "left DRAM: room for a store",
  promote: "left DRAM: room for what disks read",
  index: "left DRAM: chunks_max",
};

section("pair", "results", "Tokens of lookups", ["where they were", "lately#", "share#", "since the start#", "share#"]);
section("pair", "ends", "Why prefixes end, and why chunks leave DRAM", ["why", "lately#", "since the start#"]);
section("tables", "troubles", "What should not happen", ["what", "lately#", "since the start#"]);
section("tables", "movers", "Movers", ["mover#", "device", "state", "process#", "caches#", "jobs#", "moves bytes by", "says of itself"]);
section("tables", "disks", "Disks", ["disk#", "state", "reads now#", "writes now#", "reads at best#", "writes at best#", "queued#",
  "read in all#", "written in all#", "may write now#", "faults#"]);
section("tables", "remote", "Remote stores", ["store", "address", "state", "asked for#", "had#", "reads now#", "writes now#",
  "read in all#", "written in all#", "looked for#", "wait to be written#", "clears not confirmed#"]);
section("tables", "sessions", "Sessions", ["engine", "rank#", "session#", "state", "caches#", "jobs#", "software"]);
section("tables", "caches", "Caches", ["cache", "of", "namespace", "mover#", "moved", "state", "jobs#"]);
section("tables", "counted", "Everything that is counted", ["counter", "lately#", "since the start#"], true);

const asked = (seen) => seen.grown("lookup_tokens_asked");
let disks = false;
const hits = new Chart(
  "hits",
  RESULTS.map(([result, name]) => ({
    name: name.split(":")[0],
    class: result,
    of: (seen) => (asked(seen) ? seen.grown(`lookup_tokens.${result}`) / asked(seen) : null),
  })),
  { stacked: true, limit: () => 1, words: (value) => share(value, 1) },
);
const moved = new Chart(
  "moved",
  [
    ["DRAM to engines", "dram", "retrieve"],
    ["engines to DRAM", "dram into", "store"],
    ["disk to DRAM", "disk", "promote"],
    ["DRAM to disk", "disk into", "demote"],
  ].map(([name, className, direction]) => ({
    name,
    class: className,
    of: (seen) => seen.perS(`moved_bytes.${direction}`),
    hidden: () => className.startsWith("disk") && !disks,
  })),
  { stacked: false, limit: roundUp, words: bytesPerS },
);

function show(status) {
  const now = lately(NOW_S);
  const span_s = Number(document.querySelector("input[name=span]:checked").value);
  const span = lately(span_s);
  const start = new Between({ ...samples.at(-1), uptime_s: 0, counts: {} }, samples.at(-1));
  disks = status.disk_state !== "";
  put($("server"), status.server);
  put($("up"), `up ${duration(status.uptime_s)} · incarnation ${status.incarnation}`);
  put($("span-more"), span.seconds < span_s - NOW_S ? `seen for ${duration(span.seconds)} so far` : "");
  for (const head of document.querySelectorAll("[data-span]")) put(head, `last ${duration(span.seconds)}`);
  showTiles(status, now, span, start);
  hits.draw(span_s);
  moved.draw(span_s);
  showTiers(status);
  showCounts(span, start);
  showMovers(status);
  showDisks(status, now);
  showRemote(status, now, start);
  showSessions(status);
  showCaches(status);
}

function showTiles(status, now, span, start) {
  for (const tile of document.querySelectorAll("[data-of=disk]")) tile.hidden = !disks;
  const hits = (seen) => share(seen.grown("lookup_tokens_hit"), asked(seen));
  put($("hit-rate"), hits(span));
  const own = span.grown("lookup_tokens.unwanted");
  const theirs = own && `engines had ${share(own, asked(span))} themselves`;
  put($("hit-rate-more"), [`${hits(start)} since the start`, theirs, status.reuse].filter(Boolean).join("; "));
  const moved = (direction) => bytesPerS(now.perS(`moved_bytes.${direction}`));
  put($("retrieve-rate"), moved("retrieve"));
  put($("store-rate"), `they store ${moved("store")}`);
  put($("promote-rate"), moved("promote"));
  put($("demote-rate"), `they take ${moved("demote")}`);
  put($("lookup-rate"), perS(now.perS("lookups")));
  put($("job-rate"), `${perS(now.perS("stores"))} stores, ${perS(now.perS("retrieves"))} retrieves`);
  put($("chunks"), count(status.chunks));
  put($("chunks-more"), `of ${count(status.chunks_max)}, in ${plural(status.namespaces, "namespace")}`);
  put($("jobs"), count(status.stores + status.retrieves));
  const held = [[status.leases, "lease"], [status.pins, "pin"], [status.sessions, "session"]];
  put($("jobs-more"), held.map(([number, word]) => plural(number, word)).join(", "));
}

function showTiers(status) {
  const { arena, clean_bytes: both } = status;
  const slots = (size) => `${count(size.slots_used)} of ${count(size.slots)} x ${bytes(size.slot_bytes)}`;
  const sizes = status.slot_sizes.filter((size) => size.slots).map(slots);
  const ready = `${bytes(arena.ready_bytes)} ready (${arena.slabs_ready} of ${arena.slabs_total} slabs)`;
  const dram = {
    name: "DRAM",
    used: arena.used_bytes,
    total: arena.total_bytes,
    parts: [["dram bars", arena.used_bytes - both], ["both", both], ["ready", arena.ready_bytes - arena.used_bytes]],
    more: [
      disks && `${bytes(both)} of it on disk as well`,
      arena.ready_bytes < arena.total_bytes && ready,
      sizes.length && `slots used: ${sizes.join(", ")}`,
    ],
  };
  const devices = status.disks.map((disk) => ({
    name: `disk ${disk.device}`,
    used: disk.used_bytes,
    total: disk.total_bytes,
    parts: [["disk bars", disk.used_bytes]],
    more: [disk.directory, disk.usable ? "" : "cannot be used"],
  }));
  const make = (parent) => {
    const row = element(parent, "div", "tier");
    element(row, "b", "");
    shape(row, "svg", { class: "bar", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" });
    element(row, "span", "held");
    element(row, "span", "more");
    return row;
  };
  match($("tiers"), [dram, ...devices], make, ({ children: [name, bar, held, more] }, tier) => {
    put(name, tier.name);
    put(held, `${bytes(tier.used)} of ${bytes(tier.total)}, ${share(tier.used, tier.total).replace(" ", "\u00a0")}`);
    put(more, tier.more.filter(Boolean).join(" · "));
    bar.setAttribute("aria-label", `${tier.name}: ${held.textContent}`);
    let x = 0;
    match(bar, tier.parts, () => shape(bar, "rect", { y: 0, height: 10 }), (part, [className, size]) => {
      const width = tier.total ? (1000 * size) / tier.total : 0;
      for (const [key, value] of [["class", className], ["x", x], ["width", width]]) part.setAttribute(key, value);
      x += width;
    });
  });
}

function showCounts(span, start) {
  const both = (name) => [count(span.grown(name)), count(start.grown(name))];
  const cells = (seen, part) => [count(part(seen)), share(part(seen), asked(seen))];
  const line = (words, part) => [words, ...cells(span, part), ...cells(start, part)];
  rows("results", [
    ...RESULTS.map(([result, words]) => line(words, (seen) => seen.grown(`lookup_tokens.${result}`))),
    line("all that was asked for", asked),
  ]);
  $("results").lastElementChild.className = "sum";
  const listed = (counter, table) =>
    Object.entries(table)
      .filter(([why]) => start.grown(`${counter}.${why}`))
      .map(([why, words]) => [words, ...both(`${counter}.${why}`)]);
  rows("ends", [...listed("lookup_ends", ENDS), ...listed("evicted_for", EVICTED)]);
  const names = Object.keys(start.to);
  const troubles = names.filter((name) => name.startsWith("trouble."));
  rows("troubles", troubles.map((name) => [name.slice("trouble.".length), ...both(name)]));
  showSection("troubles", "", troubles.length > 0);
  const counted = names.filter((name) => !/^(trouble|disk|remote)\./.test(name) && start.grown(name));
  rows("counted", counted.map((name) => [name, ...both(name)]));
}

function showMovers(status) {
  const none = status.movers.length ? "" : "none yet: the first registration starts one; ";
  showSection("movers", `${none}${count(status.counters.mover_restarts)} ended since the start`);
  const facts = (mover) => Object.entries(mover.facts).map(([name, fact]) => `${name} ${fact}`).join("; ");
  rows("movers", status.movers.map((mover) => [
    `${mover.mover}`, mover.device, [mover.state, mover.state === "killed" ? "alarm" : ""], `${mover.pid}`,
    count(mover.caches), count(mover.jobs), mover.backend, [facts(mover), "wide"],
  ]));
}

function showDisks(status, now) {
  showSection("disks", `${status.disk_state}: ${count(status.chunks_on_disk)} chunks on disk`, disks);
  rows("disks", status.disks.map((disk) => [
    `${disk.device}`, [disk.said, disk.problem ? "alarm" : "wrap"], bytesPerS(now.perS(`disk.${disk.device}.read`)),
    bytesPerS(now.perS(`disk.${disk.device}.written`)), bytesPerS(disk.read_bytes_per_s),
    bytesPerS(disk.write_bytes_per_s), bytes(disk.queued_bytes), bytes(disk.read_bytes), bytes(disk.written_bytes),
    disk.daily_write_bytes ? `${bytes(disk.budget_bytes)} of ${bytes(disk.daily_write_bytes)} a day` : "no limit",
    [count(disk.faults), disk.faults ? "n alarm" : ""],
  ]));
}

function showRemote(status, now, start) {
  const remotes = remotesOf(status);
  showSection("remote", "", remotes.length > 0);
  rows("remote", remotes.map((remote) => {
    const counted = (name) => (remotes.length > 1 ? `remote.${remote.name}.${name}` : `remote_${name}`);
    const alone = remote.nodes_left_alone.length && `left alone: ${remote.nodes_left_alone.join(", ")}`;
    const unknown = remote.namespaces - remote.namespaces_known;
    const said = remote.usable
      ? ["usable", alone, unknown && `${plural(unknown, "namespace")} not known`].filter(Boolean).join(", ")
      : `not usable: ${remote.problem || "its mover does not run"}`;
    const owed = remote.clears_owed;
    return [
      remote.name, remote.url, [said, remote.usable && !alone ? "wrap" : "alarm"], perS(now.perS(counted("probed"))),
      perS(now.perS(counted("found"))), bytesPerS(now.perS(counted("read_bytes"))),
      bytesPerS(now.perS(counted("written_bytes"))), bytes(start.grown(counted("read_bytes"))),
      bytes(start.grown(counted("written_bytes"))), count(remote.looked_for), count(remote.queued_chunks),
      [count(owed), owed ? "n alarm" : ""],
    ];
  }));
}

/** Lists are cut by the server. */
function cut(shown, all) {
  return all > shown.length ? `the first ${shown.length} of ${count(all)}` : "";
}

function showSessions(status) {
  const shown = status.shown_sessions;
  showSection("sessions", shown.length ? cut(shown, status.sessions) : "nobody is connected");
  rows("sessions", shown.map((session) => [
    session.engine, session.rank < 0 ? "scheduler" : `${session.rank}`, `${session.session}`,
    session.attached ? "attached" : "opening", count(session.caches), count(session.jobs), session.software,
  ]));
}

function showCaches(status) {
  const shown = status.shown_caches;
  showSection("caches", cut(shown, status.caches), shown.length > 0);
  rows("caches", shown.map((cache) => [
    cache.name, cache.owner, cache.namespace.slice(0, 12), `${cache.mover}`, cache.mode, cache.state,
    count(cache.jobs),
  ]));
}

// Asks /status once a second, less often while nobody answers, and says first what is wrong.

const POLL_MS = 1000;
const POLL_MS_MAX = 8000;
const ANSWER_MS = 5000;
const STUCK_MS = 3000; // a brain says something four times a second
const TROUBLE_S = 300; // how long a trouble is a warning

let last = null; // the last status
let answered = performance.now(); // when it came
let advanced = performance.now(); // when the brain last said something new
let problem = ""; // why there was no answer to the last question

function showState() {
  const silent_ms = performance.now() - answered;
  const stuck_ms = performance.now() - advanced;
  const bad = last ? last.warnings.map((text) => [text, "bad"]) : [];
  const notes = last ? grownTroubles().map((text) => [text, "note"]) : [];
  let [word, more, kind] = ["well", "", "good"];
  if (problem) {
    [word, more, kind] = ["no answer", `for ${duration(silent_ms / 1000)}`, "bad"];
    const age = last ? ` What stands below is of ${clock(samples.at(-1).ms)}.` : "";
    bad.unshift([`The server does not answer: ${problem}.${age}`, "bad"]);
  } else if (!last) [word, kind] = ["asking", ""];
  else if (stuck_ms > STUCK_MS) {
    [word, more, kind] = ["stuck", `for ${duration(stuck_ms / 1000)}`, "bad"];
    bad.unshift(["The brain answers nobody: what stands below is the last that it said.", "bad"]);
  } else if (bad.length) [word, kind] = [plural(bad.length, "warning"), "bad"];
  else if (notes.length) [word, kind] = [plural(notes.length, "trouble"), "note"];
  put($("state-word"), word);
  put($("state-more"), more);
  $("state").className = `pill ${kind}`;
  document.body.classList.toggle("stale", kind === "bad" && more !== "");
  const all = [...bad, ...notes];
  $("warnings").hidden = all.length === 0;
  match($("warnings"), all, (parent) => element(parent, "li", ""), (item, [text, className]) => {
    item.className = className;
    put(item, text);
  });
  const name = last ? last.server.split(" ")[0] : "kvserver";
  document.title = all.length || more ? `(${word}) ${name}` : `${name}: ${$("hit-rate").textContent} hits`;
}

function grownTroubles() {
  const seen = lately(TROUBLE_S);
  const grown = Object.keys(seen.to).filter((name) => name.startsWith("trouble.") && seen.grown(name) > 0);
  const when = `(last ${duration(seen.seconds)})`;
  return grown.map((name) => `${count(seen.grown(name))} ${name.slice("trouble.".length)} ${when}`);
}

let failures = 0;

async function ask() {
  try {
    const reply = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    const said = read(await reply.text());
    if (!reply.ok) throw new Error(said.error);
    take(said);
    failures = 0;
    problem = "";
  } catch (error) {
    failures += 1;
    problem = error.name === "TimeoutError" ? `nothing came within ${ANSWER_MS / 1000} s` : error.message;
  }
  showState();
  setTimeout(ask, Math.min(POLL_MS * 2 ** failures, POLL_MS_MAX));
}

/** Incarnations are larger than what a number here can tell apart, so they stay text. */
function read(text) {
  return JSON.parse(text.replace(/"incarnation":(\d+)/, '"incarnation":"$1"'));
}

function take(status) {
  const before = samples.at(-1);
  answered = performance.now();
  if (!before || before.incarnation !== status.incarnation || before.uptime_s !== status.uptime_s) advanced = answered;
  keep(status, Date.now());
  last = status;
  show(status);
}

for (const choice of document.querySelectorAll("input[name=span]"))
  choice.addEventListener("change", () => last && show(last));
setInterval(showState, 1000);
ask();

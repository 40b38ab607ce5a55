"""Deliberate bugs in pledges and in the waits for them. Their own tests are asked first, then the simulator."""

from tests.drill import service
from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by
from tests.drill.service import HOLDINGS, REQUESTS, STATE

TABLE, AWAITS = f"{STATE}/pledges.py", f"{REQUESTS}/awaits.py"
CHUNKS, LOOKUP, TRANSFERS = f"{HOLDINGS}/chunks.py", f"{REQUESTS}/lookup.py", f"{REQUESTS}/transfers.py"
OWN_TESTS = tuple(
    f"tests/unit/service/test_{name}.py" for name in ("engine_sizes", "pledge_bounds", "pledges", "pledges_of_ranks")
)
FORETELLING, ELSEWHERE = f"{REQUESTS}/foretold.py", f"{REQUESTS}/computed_elsewhere.py"
WORDS, HEARD = f"{STATE}/foretold.py", "kvserver/service/remote/announcements.py"
FLEET_TESTS = ("tests/unit/service/test_foretold.py",)


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    return copy.failing_test(OWN_TESTS) or service.hunt(copy)


BUGS = (
    Bug(
        "P8",
        "a chunk that comes is not pinned for who awaits it",
        CHUNKS,
        r"self\.pin_awaited\(space, ready\)",
        "pass",
    ),
    Bug(
        "P1",
        "a waiting retrieve is ordered one chunk too early",
        TABLE,
        r"if wait\.until == depth",
        "if wait.until <= depth + 1",
    ),
    Bug("P2", "a waiting retrieve is never ordered", AWAITS, r"wait\.on_come\(now_ns\)", "pass"),
    Bug(
        "P2",
        "the copy of a chunk that came has no deadline",
        TRANSFERS,
        r"job\.take_awaiting\(\) if needs:",
        'job.take_awaiting()\n    core.timers.cancel("job", job.number)\n    if needs:',
    ),
    Bug("P2", "who waits is not told of the end of a pledge", AWAITS, r"wait\.on_end\(error, now_ns\)", "pass"),
    Bug(
        "P2",
        "a pledge has no time",
        AWAITS,
        r"core\.pledges\.begin\(made\) _set_timer\(core, made\)",
        "core.pledges.begin(made)",
    ),
    Bug(
        "P2",
        "another cache of the engine keeps a pledge whose chunks it does not write",
        AWAITS,
        r"\[\(group\.writers, group\.writer\) for",
        "[group.writer for",
    ),
    Bug("P2", "a pledge without progress lives on", TABLE, r"min\(self\.expires_ns, [^\n]*", "self.expires_ns"),
    Bug("P2", "progress prolongs the time to live", TABLE, r"min\(self\.expires_ns, (self[^\n]*)\)", r"\1"),
    Bug("P2", "a chunk that came is no progress", AWAITS, r"made\.moved\(now_ns\)", "pass"),
    Bug(
        "P2",
        "the pledges of a dead process live on",
        f"{REQUESTS}/sessions.py",
        r"core\.pledges\.breaks\([^\n]*",
        "pass",
    ),
    Bug(
        "P2",
        "a store that finds no room leaves its pledge",
        TRANSFERS,
        r"if walk\.why: awaits",
        "if False:\n        awaits",
    ),
    Bug("P2", "a failed store leaves its pledge", CHUNKS, r"self\.pledged\.gave_up\([^\n]*", "pass"),
    Bug(
        "P2",
        "a store that is refused leaves its pledge",
        TRANSFERS,
        r"awaits\.store_refused\([^\n]*",
        "pass",
    ),
    Bug(
        "P2",
        "one rank's failed store leaves the pledge",
        TRANSFERS,
        r"awaits\.not_stored\(core, job\.session[^\n]*",
        "pass",
    ),
    Bug("P2", "a pledge lives on in a cleared namespace", CHUNKS, r"self\.pledged\.cleared\(space\)", "pass"),
    Bug("P2", "an engine awaits itself", TABLE, r"or pledge\.is_of\(engine\) ", ""),
    Bug(
        "P2",
        "a pledge begins behind what another engine has pledged",
        AWAITS,
        r"or core\.pledges\.of\(space, key\) is not None or",
        "or",
    ),
    Bug("P2", "a chunk is pledged that is elsewhere", AWAITS, r"or _is_elsewhere\([^)]*\)", "", OWN_TESTS),
    Bug("P2", "a chunk is pledged that waits elsewhere", AWAITS, r" or node\.parent is None [^)]*\)", ")", OWN_TESTS),
    Bug("P2", "a chunk that is being stored is not pledged", AWAITS, r"node\.state == READY or", "True or", OWN_TESTS),
    Bug("P1", "other keys than those of the pledge are awaited", TABLE, r"if ours\[low[^\n]*", "if True:"),
    Bug(
        "P1",
        "what lies before the pledge is not compared",
        TABLE,
        r"or pledge\.after != keys\[:at\]\[-KEY_BYTES:\]",
        "",
    ),
    Bug(
        "P5", "pledges fill more than their share", AWAITS, r"room\.chunks, room\.slot_bytes // [^)]*\)", "room.chunks"
    ),
    Bug("P5", "an ended pledge keeps its share", TABLE, r"self\._take\(pledge, Size\(-1[^\n]*", "pass"),
    Bug("P5", "a chunk that came keeps its share", TABLE, r"self\._take\(pledge, Size\(0, -1, 0\)\)", "pass"),
    Bug("P2", "an engine leaves no room to others", TABLE, r", \(3, 4\)\)", ", (1, 1))", OWN_TESTS),
    Bug("P2", "a tenant leaves no room to others", TABLE, r"\(\(1, 1\), \(7, 8\)", "((1, 1), (1, 1)", OWN_TESTS),
    Bug(
        "P2",
        "an engine's share is of the whole room, not of what others leave",
        TABLE,
        r"\(most - taken\[0\] \+ own\) \* part // whole - own for",
        "min(most - taken[0], most * part // whole - own) for",
        OWN_TESTS,
    ),
    Bug(
        "P2",
        "a session makes more pledges than its engine may",
        AWAITS,
        r"if not core\.pledges\.room\([^\n]*",
        "if False:",
    ),
    Bug(
        "P2",
        "a session makes as many pledges as it likes",
        AWAITS,
        r"if len\(session\.pledges\) >= [^\n]*",
        "if False:",
    ),
    Bug("P2", "another session takes a pledge back", AWAITS, r"and made\.session is session", ""),
    Bug(
        "P2",
        "a retrieve waits although nothing comes any more",
        TRANSFERS,
        r"if until > lease\.chunks and lease\.wait is None:",
        "if False:",
    ),
    Bug("P3", "a lease that ends goes on growing", LOOKUP, r"core\.pledges\.leave\(lease\.wait\)", "pass"),
    Bug(
        "P3",
        "a retrieve that ends goes on waiting",
        TRANSFERS,
        r"core\.pledges\.leave\(job\.take_[^\n]*",
        "job.take_awaiting()",
    ),
    Bug(
        "P2",
        "a retrieve whose chunks never come is not ended at its deadline",
        TRANSFERS,
        r"if job\.awaiting is not None: give_up_waiting\(core, job, awaits",
        "if False:\n        give_up_waiting(core, job, awaits",
    ),
    Bug(
        "P7",
        "an unregistered cache leaves its waiting retrieves",
        f"{REQUESTS}/caches.py",
        r"core\.jobs\[number\]\.is_waiting",
        "core.jobs[number].held",
    ),
    Bug("P7", "a plain lookup is answered as if it might wait", LOOKUP, r"and isinstance\(request, Await\)", ""),
    Bug(
        "P2",
        "a broken word is forgotten with the life of its engine",
        AWAITS,
        r"return Pledger\(cache\.tenant, session\.engine\.name\)",
        'return Pledger(cache.tenant, f"{session.engine.name} {session.number}")',
        OWN_TESTS,
    ),
    Bug("P2", "a broken word is forgotten at once", TABLE, r"self\._distrusted\[broken\] = until_ns", "pass"),
    Bug(
        "P2",
        "a crash is a broken word",
        AWAITS,
        r'if how == "not-stored" or \(how',
        'if how in ("not-stored", "died") or (how',
        OWN_TESTS,
    ),
    Bug("P2", "a pledge is made where nothing can be stored now", AWAITS, r"admission\.check_store\([^\n]*", "pass"),
    Bug(
        "P2",
        "a word of another server counts for ever",
        WORDS,
        r"return now_ns < self\.until_ns",
        "return 0 < self.until_ns",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a word of unknown age is believed",
        HEARD,
        r"since_ns = known\.announcements[^\n]*",
        "since_ns = now_ns",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a word counts from when it is heard",
        HEARD,
        r"mark, since_ns \+ core",
        "mark, now_ns + core",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a server awaits its own word",
        HEARD,
        r" and not tier\.foretellings\.is_mine\(mark, now_ns\)",
        "",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a word that is taken back counts on",
        HEARD,
        r"tier\.foretold\.comes_no_more\(mark\)",
        "pass",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what comes no more is not taken back",
        FORETELLING,
        r"tier\.foretellings\.cut\(row, max[^\n]*",
        "tier.foretellings.cut(row, max(row.stored, row.written)) and []",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what cannot be written is not taken back",
        FORETELLING,
        r"_tell\(core, tier, row\.space, tier\.foretellings\.end\(row\), now_ns, comes=False\) elif",
        "tier.foretellings.end(row)\n    elif",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what others said to have written is not taken back",
        FORETELLING,
        r"if back: _tell\([^\n]*",
        "pass",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a chunk that others said to have written is over before it is stored",
        FORETELLING,
        r"most = len\(row\.keys\) [^\n]*",
        "most = len(row.keys)",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what this server wrote is taken back",
        WORDS,
        r"self\.said\.discard\(mark\)",
        "pass",
        FLEET_TESTS,
    ),
    Bug("P2", "a word is given once", FORETELLING, r"now_ns - row\.told_ns >= core", "False and core", FLEET_TESTS),
    Bug(
        "P2",
        "what was held before the pledge is not written",
        FORETELLING,
        r"tier\.used\.append\([^\n]*",
        "pass",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what is never written is foretold",
        FORETELLING,
        r"last = len\(row\.keys\) if [^\n]*",
        "last = row.written",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "what is pledged is written with its second use",
        f"{REQUESTS}/pursuits.py",
        r"or tier\.foretells\(space, epoch, node\)",
        "",
        FLEET_TESTS,
    ),
    Bug("P2", "all servers foretell", FORETELLING, r'if tier\.remote\.pledged == "write" else None', "", FLEET_TESTS),
    Bug(
        "P2",
        "a wait for another server does not end with its word",
        ELSEWHERE,
        r"core\.pledges\.breaks\(pledge, how\)",
        "pass",
        FLEET_TESTS,
    ),
    Bug(
        "P2", "a wait goes on without the store", ELSEWHERE, r"if not tier\.usable or [^\n]*", "if False:", FLEET_TESTS
    ),
    Bug("P2", "chunks are read that nobody awaits", ELSEWHERE, r"if not pledge\.waits:", "if False:", FLEET_TESTS),
    Bug(
        "P2",
        "a chunk that was written and cannot be read is waited for",
        ELSEWHERE,
        r'return None if first else "not-stored"',
        "return None",
        FLEET_TESTS,
    ),
    Bug(
        "P2",
        "a broken word of a server is believed at once",
        ELSEWHERE,
        r" or core\.pledges\.is_distrusted\([^)]*\)",
        "",
        FLEET_TESTS,
    ),
    Bug("P2", "words of others take all room", ELSEWHERE, r" if room\.pledges else 0", "", FLEET_TESTS),
    Bug(
        "P2",
        "few tokens are not read although they are awaited",
        "kvserver/service/remote/reads.py",
        r" and not pursuit\.is_awaited",
        "",
        FLEET_TESTS,
    ),
)

"""Deliberate bugs in what connectors decide. Seeds of tests/offload_sim are asked first, then the unit tests."""

from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by

SEED0 = 500_000
"""Not the seeds that run by default."""
SEEDS, EVENTS = 60, 400
UNIT_TESTS = ("tests/unit/offload",)
AWAITS = ("tests/unit/offload/test_offload_awaits.py",)

OFFLOAD = "client/kvclient/offload"
LOOKUPS, PLEDGING = f"{OFFLOAD}/lookups.py", f"{OFFLOAD}/pledging.py"
RANGES, DECIDE, REQUEST = (f"{OFFLOAD}/{name}.py" for name in ("ranges", "decide", "request"))


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    seed = copy.failing_seed("tests.offload_sim", seed0=SEED0, seeds=SEEDS, events=EVENTS)
    return seed or copy.failing_test(UNIT_TESTS)


BUGS = (
    # ------------------------------------------------------------ P1: no bytes but those stored under that key
    Bug(
        "P1",
        "no token is left to compute",
        OFFLOAD,
        r"return tokens if options\.engine_steps_back else tokens - 1",
        r"return tokens",
    ),
    Bug(
        "P1", "a window is a token short", RANGES, r"(max\(hbm_tokens, end_tokens - group\.window_tokens)\)", r"\1 + 1)"
    ),
    Bug(
        "P1",
        "the state of the chunk before is retrieved",
        RANGES,
        r"return end_tokens - group\.block_tokens",
        r"return max(0, end_tokens - 2 * group.block_tokens)",
    ),
    Bug(
        "P1",
        "a prefix that ends inside a block is continued",
        RANGES,
        r"return all\(hbm_tokens % group\.block_tokens == 0 for [^\n]*\)",
        r"return True",
    ),
    Bug("P1", "the null block is written", RANGES, r'return \(\), "null-block"', r"pass"),
    Bug("P1", "a hole is stored as if it were held", RANGES, r"held = ids\.index\([^\n]*", r"held = len(ids)"),
    Bug(
        "P1",
        "a chunk is stored before all of it is computed",
        DECIDE,
        r"min\(tokens // self\._options\.chunk_tokens, it\.chunks\)",
        r"min(-(-tokens // self._options.chunk_tokens), it.chunks)",
    ),
    Bug(
        "P1",
        "blocks are stored while a retrieve writes them",
        DECIDE,
        r"if it\.phase is Phase\.RETRIEVING: return False (self\.admitted)",
        r"\1",
    ),
    Bug(
        "P1",
        "blocks are let go while a store reads them",
        DECIDE,
        r"return self\._stores\.are_of\(request\) or ",
        r"return ",
    ),
    Bug(
        "P1",
        "chunks are stored under the wrong parent",
        f"{OFFLOAD}/request.py",
        r"return self\.key_range\(chunk - 1, chunk\) if chunk\b",
        r"return self.key_range(chunk, chunk + 1) if chunk",
    ),
    Bug("P1", "the first rank's report ends a job", OFFLOAD, r"if entry\.ranks_left: return None", r"pass"),
    Bug(
        "P1",
        "the luckiest rank's count is the job's",
        OFFLOAD,
        r"min\(entry\.chunks, chunks\)",
        r"max(entry.chunks, chunks)",
    ),
    Bug(
        "P1",
        "a lease is used when it has ended",
        OFFLOAD,
        r"now_s < self\.lease\.expires_monotonic_s - options\.lease_spare_s",
        r"True",
    ),
    # ------------------------------------------------------------ P2: every failure is a miss within its deadline
    Bug(
        "P2",
        "a late answer is waited for",
        OFFLOAD,
        r"if it\.lookup is None or now_s < it\.lookup\.due_s:",
        r"if True:",
    ),
    Bug(
        "P2",
        "a request waits for its turn for ever",
        DECIDE,
        r"if now_s - it\.queued_s < self\._options\.retrieve_wait_s:",
        r"if True:",
    ),
    Bug(
        "P2",
        "a request whose retrieve has failed asks again",
        DECIDE,
        r"it\.is_barred, it\.why = True, why",
        r"it.why = why",
    ),
    Bug(
        "P2",
        "a retrieve that failed leaves its chunks counted as held",
        DECIDE,
        r'it\.frontier, it\.stopped, it\.held_for_sure = [^\n]*, "", None',
        r'it.stopped, it.held_for_sure = "", None',
    ),
    Bug(
        "P2",
        "a late retrieve wakes another life of its request",
        DECIDE,
        r"if it\.retrieve == job:",
        r"if it.phase is Phase.RETRIEVING:",
    ),
    # ------------------------------------------------------------ P5: leases that nobody uses fill a tier
    Bug(
        "P5",
        "a failed retrieve keeps its lease",
        DECIDE,
        r"[\w.]+\.release\(order\.lease\) # some rank",
        r"pass  # some rank",
    ),
    # ------------------------------------------------------------ P7: every request gets one reply
    Bug(
        "P7",
        "an answer is taken for that of an earlier question",
        OFFLOAD,
        r" and it\.lookup\.number == number else None",
        r" else None",
    ),
    # ------------------------------------------------------------ P8: a prompt hits from any process
    Bug(
        "P8",
        "chunks behind a gap are stored, which no lookup finds",
        DECIDE,
        r'it\.stopped = ended\.why or "short"',
        r"pass",
    ),
    # ------------------------------------------------------------ prompts that another engine computes
    Bug(
        "P2",
        "another engine is waited for without end",
        LOOKUPS,
        r"return waited_s < options\.await_wait_s",
        "return True",
        AWAITS,
    ),
    Bug(
        "P2",
        "a producer that gives no sign is waited for",
        LOOKUPS,
        r"silent_s < options\.await_producer_s",
        "True",
        AWAITS,
    ),
    Bug(
        "P2",
        "signs of a producer prolong the wait without end",
        LOOKUPS,
        r"waited_s < options\.await_wait_s and",
        "",
        AWAITS,
    ),
    Bug(
        "P2",
        "a producer that broke its word is expected to come back",
        LOOKUPS,
        r"and answer\.chunks >= it\.seen_chunks",
        "",
        AWAITS,
    ),
    Bug("P2", "a preempted consumer expects its own output", LOOKUPS, r"and not it\.is_admitted", "", AWAITS),
    Bug(
        "P2",
        "a longer prompt is expected whole of its producer",
        LOOKUPS,
        r"return chunks if handed is None else [^\n]*",
        "return chunks",
        AWAITS,
    ),
    Bug("P2", "everybody expects a producer", LOOKUPS, r'it\.side == "consumer" and', "", AWAITS),
    Bug("P2", "blocks wait in any number", DECIDE, r"held > self\._options\.await_tokens_max or ", "", AWAITS),
    Bug("P2", "retrieves wait in any number", DECIDE, r"or len\(self\._awaiting\) >= [\w.]+", "", AWAITS),
    Bug(
        "P2",
        "a retrieve that has ended counts as one that waits",
        DECIDE,
        r"self\._awaiting\.pop\(job, None\)",
        "self._awaiting.get(job)",
        AWAITS,
    ),
    Bug(
        "P2",
        "a retrieve begins to wait when its time is nearly over",
        DECIDE,
        r"or left_s < self\._options\.await_wait_s / 2",
        "",
        AWAITS,
    ),
    Bug(
        "P2",
        "an aborted request waits on with its blocks",
        DECIDE,
        r"self\._lookups\.release\(self\._awaiting\[[^\n]*",
        "pass",
        AWAITS,
    ),
    Bug(
        "P8",
        "a consumer loads a part though more is to come",
        DECIDE,
        r"or self\._lookups\.expects_beyond\(it, answer\)",
        "",
        AWAITS,
    ),
    Bug(
        "P8", "what came of a retrieve that ended short is lost", DECIDE, r"until = max\(until, [^\n]*", "pass", AWAITS
    ),
    Bug(
        "P8", "what was awaited is stored again", DECIDE, r"it\.frontier = max\(it\.frontier, chunks\)", "pass", AWAITS
    ),
    Bug("P8", "a producer's only step is not stored", REQUEST, r'or self\.side == "producer"', "", AWAITS),
    Bug("P8", "a producer does not wait for a newer answer", DECIDE, r"it\.may_end_at_once or not", "not", AWAITS),
    Bug(
        "P2",
        "a prompt is pledged before it is computed",
        DECIDE,
        r"if self\._options\.pledges\(it\.side\) and not",
        "if not",
        AWAITS,
    ),
    Bug(
        "P2",
        "a preempted or aborted request keeps its pledge",
        PLEDGING,
        r"self\._over\.append\(pledge\)",
        "pass",
        AWAITS,
    ),
    Bug(
        "P2",
        "a request whose last stores are under way takes its pledge back",
        PLEDGING,
        r"if pledge is not None and [^\n]*",
        "if pledge is not None:",
        AWAITS,
    ),
    Bug(
        "P2",
        "a request that has ended keeps the pledge that comes too late",
        PLEDGING,
        r"self\._over\.append\(result\)",
        "pass",
        AWAITS,
    ),
)

"""Deliberate bugs in what the server decides. Seeds of the simulator are asked first, then unit tests of the core."""

from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by

SEED0 = 500_000
"""Not the seeds that `make sim` uses by default."""
SEEDS, EVENTS = 400, 300
HTTP_TESTS = ("tests/unit/brain/test_http.py",)
UNIT_TESTS = ("tests/unit/holdings", "tests/unit/service", "tests/unit/disk")

SERVICE = "kvserver/service"
HOLDINGS, REQUESTS, DISK = f"{SERVICE}/holdings", f"{SERVICE}/requests", f"{SERVICE}/disk"
STATE, OPERATORS = f"{SERVICE}/state", f"{SERVICE}/operators"


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    return copy.failing_seed("tests.sim", seed0=SEED0, seeds=SEEDS, events=EVENTS) or copy.failing_test(UNIT_TESTS)


BUGS = (
    # ------------------------------------------------------------ P1: no bytes but those stored under that key
    Bug(
        "P1",
        "a chunk is sealed with a shard missing",
        HOLDINGS,
        r"for part in parts: (if pending\.parts\.get\(part\) != SEALED)",
        r"for part in parts[:1]:\n            \1",
    ),
    Bug(
        "P8",
        "every rank writes every chunk of a shard that several hold",
        REQUESTS,
        r"return own\.writers, own\.writer,",
        r"return 1, 0,",
    ),
    Bug(
        "P1",
        "a store of a session that has ended is sealed",
        REQUESTS,
        r'(kept = done\.status == "done") and not job\.session\.ended',
        r"\1",
    ),
    Bug(
        "P1",
        "an abandoned store is sealed",
        REQUESTS,
        r'kept = done\.status == "done" and',
        r'kept = done.status in ("done", "abandoned") and',
    ),
    Bug(
        "P1",
        "chunks are served that are not sealed",
        "kvserver/index/space.py",
        r"node is not None and node\.state == READY and node\.depth == middle",
        r"node is not None and node.depth == middle",
    ),
    Bug(
        "P1",
        "a chunk is served whose parent is not sealed",
        "kvserver/index/space.py",
        r"if at\.parent\.state != READY:",
        r"if at.parent.state == GONE:",
    ),
    Bug(
        "P1",
        "a lookup ignores its namespace",
        f"{REQUESTS}/lookup.py",
        r"space = core\.chunks\.spaces\.get\(request\.namespace\)",
        r"space = next(iter(core.chunks.spaces.values()), None)",
    ),
    Bug(
        "P1",
        "a retrieve ignores its namespace",
        REQUESTS,
        r"if lease\.space\.digest != cache\.digest:",
        r"if lease.space.geometry != core.chunks.spaces[cache.digest].geometry:",
    ),
    Bug(
        "P1",
        "a tenant finds what another one stored",
        f"{REQUESTS}/lookup.py",
        r"\bin session\.engine\.accounts",
        r"is not None",
    ),
    Bug(
        "P1",
        "a window is a chunk shorter than the model's",
        "kvserver/index/coverage.py",
        r"// space\.geometry\.chunk_tokens\)",
        r"// space.geometry.chunk_tokens + 1)",
    ),
    Bug(
        "P1",
        "the state of the chunk before is served",
        "kvserver/index/coverage.py",
        r"return chunks - 1\b",
        r"return max(0, chunks - 2)",
    ),
    Bug(
        "P1",
        "more is retrieved than was leased",
        REQUESTS,
        r"if span\.last > lease\.reach:",
        r"if span.last > lease.reach + 1:",
    ),
    Bug(
        "P1",
        "an expired lease is honoured",
        REQUESTS,
        r"if lease is None or lease\.expires_ns <= now_ns:",
        r"if lease is None:",
    ),
    Bug("P1", "leases outlive a clear", f"{OPERATORS}/clear_namespaces.py", r"\bend_lease\(core, lease\)", r"pass"),
    Bug(
        "P1",
        "a pinned slot is freed",
        "kvserver/index/eviction.py",
        r"if node\.pins or node\.state != READY",
        r"if node.state != READY",
    ),
    Bug("P1", "a retrieve has no pin of its own", REQUESTS, r"core\.chunks\.pin\(lease\.tail\)", r"pass"),
    Bug(
        "P1",
        "a slot is used again before its mover is reaped",
        REQUESTS,
        r"core\.emit\(Ask\(KillMover\(mover\.number\)\)\)",
        r"core.emit(Ask(KillMover(mover.number)))\n    for number in sorted(mover.jobs):"
        r"\n        transfers.lost(core, core.jobs[number], why, 0)",
    ),
    Bug(
        "P1",
        "a slot is used again when its job was cancelled",
        REQUESTS,
        r'job\.become\("cancelled"\)',
        r'job.become("cancelled")\n    core.chunks.job_ended(job.number)',
    ),
    Bug(
        "P1",
        "what is evicted stays in the ledger",
        HOLDINGS,
        r"if node\.present: [^\n]* self\.withdrawn\.append\(offset\)(?= self\.pool\.free)",
        r"pass",
    ),
    Bug(
        "P1",
        "a slot is withdrawn from the ledger after the order that writes it",
        f"{SERVICE}/service.py",
        r"effects = \[Withdraw\(([^\n]*)\), \*effects\]",
        r"effects = [*effects, Withdraw(\1)]",
    ),
    Bug(
        "P1",
        "pages of neighbouring blocks may overlap",
        "kvserver/transfer/layout.py",
        r"if run\.block_stride != stride or [^\n]*:",
        r"if run.block_stride != stride:",
    ),
    Bug(
        "P1",
        "an extent is free while its write is under way",
        HOLDINGS,
        r"job\.takes\(\[[^\n]*, \[taken\[part\] for part in job\.parts\]\)",
        r"\g<0>\n        for extent in job.extents:\n            self.extents.free(extent)",
    ),
    Bug(
        "P1",
        "what could not be read is served",
        f"{DISK}/mover.py",
        r"wrong = \{job\.parts\[fault\.item\] for fault in moved\.faults\}",
        r"wrong = set[int]()",
    ),
    Bug(
        "P1",
        "one good shard makes a group that was read",
        HOLDINGS,
        r"bad = \{space\.parts\[part\]\.group for part in wrong\}",
        r"bad = {space.parts[part].group for part in wrong if len(wrong) > 1}",
    ),
    Bug(
        "P1",
        "slots of a read are free before its mover is reaped",
        f"{DISK}/mover.py",
        r'(movers\.kill\(core, tier\.mover, f"did not end disk job \{number\}"\))',
        r"\1\n    gone(core, tier, now_ns)",
    ),
    Bug(
        "P1",
        "a chunk that moves keeps its old extents",
        HOLDINGS,
        r"if extents\[part\] != ABSENT: self\.extents\.free\(extents\[part\]\)",
        r"pass",
    ),
    Bug(
        "P1",
        "what was cleared comes back from disk",
        f"{DISK}/recovery.py",
        r"if generation > void and",
        r"if generation and",
    ),
    Bug(
        "P1",
        "a clear is answered before the devices know it",
        f"{STATE}/clear_notes.py",
        r"clear\.await_notes\(digests\)",
        r"clear.await_notes(digests)\n        for digest in digests:"
        r"\n            if clear.note_ended(digest):\n                self._clears.end(clear)",
    ),
    Bug(
        "P1",
        "a clear that no disk could note is said to be durable",
        f"{STATE}/clear_notes.py",
        r"clear\.fail\(f\"not durable yet[^\n]*",
        r"pass",
    ),
    Bug(
        "P1",
        "an older note overwrites a later clear",
        f"{STATE}/clear_notes.py",
        r"max\(void, self\.noted\.get\(note, 0\)\)",
        r"void",
    ),
    Bug(
        "P1",
        "notes of cleared prefixes are not heeded",
        f"{DISK}/recovery.py",
        r"return generation <= max\(floor, cleared\.get\(key, 0\)\)",
        r"return False",
    ),
    Bug(
        "P1",
        "a hold lives on in a cleared namespace",
        f"{OPERATORS}/clear_namespaces.py",
        r'holds\.end\(core, hold, "its namespace was cleared"\)',
        r"pass",
    ),
    Bug(
        "P1",
        "stores go on right after the weights have changed",
        REQUESTS,
        r"max\(until_ns, core\.operators\.fences\.get\(namespace, 0\)\)",
        r"until_ns",
    ),
    # ------------------------------------------------------------ P2: every failure is a miss within its deadline
    Bug(
        "P2",
        "a store that never begins is not discarded",
        f"{SERVICE}/service.py",
        r"transfers\.discard_overdue\(core, now_ns\)",
        r"pass",
    ),
    Bug(
        "P2",
        "a mover that does not end a job is never killed",
        f"{SERVICE}/service.py",
        r'movers\.kill\(core, job\.cache\.mover, f"did not end job \{number\}"\)',
        r"pass",
    ),
    Bug(
        "P2",
        "a mover that does not map is never killed",
        REQUESTS,
        r'\bkill\(core, core\.caches\[number\]\.mover, f"did not map cache \{number\}"\)',
        r"pass",
    ),
    Bug(
        "P2",
        "a lease has no timer",
        REQUESTS,
        r'core\.timers\.set\(lease\.expires_ns, "lease", lease\.number\)',
        r"pass",
    ),
    Bug(
        "P2",
        "a record that cannot be read is offered again",
        f"{DISK}/reads.py",
        r"if groups and lost and core\b",
        r"if groups and lost and not core",
    ),
    Bug(
        "P2",
        "a disk mover that answers no note is not noticed",
        f"{STATE}/clear_notes.py",
        r"self\._silent_from_ns = now_ns",
        r"self._silent_from_ns = 0",
    ),
    # ------------------------------------------------------------ P3: a dead engine's mappings are freed
    Bug(
        "P3",
        "leases outlive their engine",
        REQUESTS,
        r"\n +for number in sorted\([\w.]*engine\.leases\): end_lease\(core, core\.leases\[number\]\)",
        r"\n        pass",
    ),
    Bug("P3", "boards of ended sessions stay mapped", REQUESTS, r"movers\.drop_board\(core, mover, session\)", r"pass"),
    Bug(
        "P3",
        "an attached session is ended by its timer",
        REQUESTS,
        r'(session\.attach\(peer\)) core\.timers\.cancel\("attach", session\.number\)',
        r"\1",
    ),
    # ------------------------------------------------------------ P4: kill -9 loses nothing that was sealed
    Bug(
        "P4",
        "a chunk is in the ledger after the reply that promises it",
        f"{SERVICE}/service.py",
        r"effects = \[Publish\(([^\n]*)\), \*effects\]",
        r"effects = [*effects, Publish(\1)]",
    ),
    Bug("P4", "chunks that hold nothing are not marked", HOLDINGS, r"self\._mark_before\(space, node\)", r"pass"),
    Bug(
        "P4",
        "the older of two records is restored",
        f"{DISK}/restore.py",
        r"older = min\(rival, record,",
        r"older = max(rival, record,",
    ),
    Bug(
        "P4",
        "a chunk is restored with shards missing",
        f"{DISK}/restore.py",
        r"if len\(records\) == len\(wanted\):",
        r"if records:",
    ),
    Bug("P4", "a restored slot is free", "kvserver/tiers/slots.py", r"del slab\.free\[position\]", r"pass"),
    Bug(
        "P4",
        "a group is recovered from disk with shards missing",
        f"{DISK}/recovery.py",
        r"len\(whole\) == len\(parts\)",
        r"whole",
    ),
    Bug(
        "P4",
        "every record has the same generation",
        f"{DISK}/writes.py",
        r"core\.chunks\.next_generation\(\) if",
        r"1 if",
    ),
    Bug(
        "P4",
        "a device is erased before it is empty",
        f"{DISK}/drain.py",
        r"if drain\.queue or pool\.bytes_used:",
        r"if drain.queue:",
    ),
    # ------------------------------------------------------------ P5: chunks never exceed a tier's cap
    Bug("P5", "writes are not charged to the budget", "kvserver/tiers/placement.py", r"self\._bytes -= count", r"pass"),
    Bug(
        "P5",
        "writes that wait are not counted",
        "kvserver/tiers/placement.py",
        r"self\.queued_bytes \+= count",
        r"pass",
    ),
    Bug(
        "P5",
        "a tenant holds more than its maximum",
        HOLDINGS,
        r"self\.taken_bytes \+ more_bytes - self\.max_bytes",
        r"0",
    ),
    Bug(
        "P5",
        "a tenant holds more than its maximum on disk",
        HOLDINGS,
        r"if not self\._fit_quota\(claim\.account, wanted\):",
        r"if False:",
    ),
    Bug(
        "P5",
        "a slot is never refunded to its tenant",
        HOLDINGS,
        r"self\._charge\(self\.owner\(offset\), -self\.slot_bytes\(offset\)\)",
        r"pass",
    ),
    Bug(
        "P5",
        "a tenant's guarantee does not hold",
        HOLDINGS,
        r"max\(0, self\.held_bytes - self\.guaranteed_bytes\)",
        r"self.held_bytes",
    ),
    Bug("P5", "operators may hold all of DRAM", REQUESTS, r"if held_bytes > most_bytes:", r"if held_bytes < 0:"),
    Bug(
        "P5", "a hold that is over keeps its pin", REQUESTS, r"core\.chunks\.unpin\(hold\.space, hold\.tail\)", r"pass"
    ),
    # ------------------------------------------------------------ P6: /healthz and /metrics never wait for a device
    Bug(
        "P6",
        "silent connections keep others out",
        "kvserver/brain/http/server.py",
        r"crowded = len\(self\._clients\) >= self\._most and self\.put_one_out\(\)",
        r"crowded = False",
        HTTP_TESTS,
    ),
    Bug(
        "P6",
        "a connection has no deadline",
        "kvserver/brain/http/server.py",
        r"asyncio\.timeout\(CONNECTION_S\)",
        r"asyncio.timeout(None)",
        HTTP_TESTS,
    ),
    # ------------------------------------------------------------ P7: every request gets one reply
    Bug(
        "P7",
        "nobody who waits is told that the disk mover is gone",
        f"{DISK}/mover.py",
        r"[\w.]+\.fail_all\([^\n]*mover_lost\(\), now_ns\)",
        r"pass",
    ),
    Bug(
        "P7",
        "writes that wait for a segment wait for ever",
        f"{DISK}/segments.py",
        r"writes\.take_up\(core, tier, device\)(?= def )",
        r"pass\n\n\n",
    ),
    # ------------------------------------------------------------ P8: a prompt hits from any process, after any restart
    Bug(
        "P8",
        "a lookup before the disks are read does not say so",
        REQUESTS,
        r"[\w.]+\.newest\.get\(namespace, 0\) > [\w.]+\.noted\.get\(namespace, 0\)",
        r"False",
    ),
    Bug(
        "P8",
        "chunks are restored without their marks",
        f"{DISK}/restore.py",
        r"or not \(present or mark != ABSENT\):",
        r"or not present:",
    ),
)

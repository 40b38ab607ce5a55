"""Deliberate bugs in the client library and in the vLLM connector's own files. Unit tests are asked."""

from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by

UNIT_TESTS = ("tests/unit/client", "tests/unit/vllm")

KVCLIENT = "client/kvclient"
TRANSPORT, VLLM = f"{KVCLIENT}/transport", f"{KVCLIENT}/vllm"
JOBS, INQUIRIES, CONNECTION = f"{TRANSPORT}/jobs.py", f"{TRANSPORT}/inquiries.py", f"{TRANSPORT}/connection.py"


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    return copy.failing_test(UNIT_TESTS)


BUGS = (
    # ------------------------------------------------------------ P1: no bytes but those stored under that key
    Bug(
        "P1",
        "a job ends before all its parts have",
        JOBS,
        r"while running or \(whole and begun < count\):",
        r"while whole and (running or begun < count):",
    ),
    Bug(
        "P1",
        "a lease of the server's earlier life is used",
        JOBS,
        r"if session\.welcome\.incarnation != lease\.incarnation:",
        r"if False:",
    ),
    Bug(
        "P1",
        "a store claims what follows a short part",
        JOBS,
        r"sum\(result\.chunks for result in results\[: leading \+ 1\]\)",
        r"sum(result.chunks for result in results)",
    ),
    Bug(
        "P1",
        "a retrieve ends with its first group",
        f"{KVCLIENT}/memory/blocks.py",
        r"max\(end for _, end in ranges\)",
        r"ranges[0][1]",
    ),
    Bug(
        "P1",
        "blocks of a store are free when one rank has stored",
        f"{VLLM}/pins.py",
        r"if not ranks_left:",
        r"if True:",
    ),
    Bug(
        "P1",
        "devices of one kind share whatever their names are",
        f"{VLLM}/devices.py",
        r'else f"\{platform\.device_type\} \{name\}"',
        r"else platform.device_type",
        ("tests/unit/vllm/test_vllm_devices.py",),
    ),
    Bug(
        "P1",
        "a portable store waits for an event that was never recorded",
        f"{KVCLIENT}/memory/torch_device.py",
        r"event\.record\([^\n]*\) return event",
        r"return event",
        ("tests/unit/vllm/test_vllm_devices.py",),
    ),
    Bug(
        "P1",
        "hashes of other blocks are believed",
        f"{VLLM}/hbm.py",
        r"if self\._cached is None or len\(hashes\) != [^\n]*:",
        r"if self._cached is None:",
    ),
    Bug("P1", "HBM is said to hold a block more", f"{VLLM}/hbm.py", r"held = probe \+ 1\b", r"held = probe + 2"),
    Bug(
        "P1",
        "scales that move are not noticed",
        f"{VLLM}/side_tensors.py",
        r"if self\._described not in \(None, where\):",
        r"if False:",
    ),
    Bug(
        "P1",
        "an engine's scales are in no namespace",
        f"{VLLM}/layout.py",
        r"(return Layout\(memory\.allocations, regions, layers, orders), shown,",
        r"\1, (),",
    ),
    Bug(
        "P1",
        "a release of vLLM that is known to be broken starts",
        f"{VLLM}/releases.py",
        r"if row is not None and row\.why_broken:",
        r"if False:",
    ),
    Bug(
        "P1",
        "a place that vLLM describes is not compared",
        f"{VLLM}/layout.py",
        r"if wanted is None: return (?=if min)",
        r"return\n    ",
    ),
    Bug(
        "P1",
        "a type of KV that a platform registers is in no namespace",
        f"{VLLM}/namespace.py",
        r"\*\*\(\{\"handler\": handler\} if handler else \{\}\),",
        r"",
    ),
    Bug(
        "P1",
        "stages take each other's shards",
        f"{VLLM}/layout.py",
        r"shard=rank // writers,",
        r"shard=(ranks - 1 - rank) // writers,",
        ("tests/unit/vllm/test_vllm_layout.py",),
    ),
    Bug(
        "P1",
        "a stage has no shard of its own",
        f"{VLLM}/layout.py",
        r"shards=ranks // writers,",
        r"shards=1,",
        ("tests/unit/vllm/test_vllm_layout.py",),
    ),
    Bug(
        "P1",
        "how layers are divided among stages is in no namespace",
        f"{VLLM}/namespace.py",
        r'"layers": layers if len\(stages\) > 1 else layers\[0\],',
        r'"layers": layers[0],',
        ("tests/unit/vllm/test_vllm_stages.py",),
    ),
    Bug(
        "P1",
        "how tokens are dealt out to ranks is in no namespace",
        f"{VLLM}/namespace.py",
        r"\] if ranks > 1 else \[\]",
        r"] if False else []",
        ("tests/unit/vllm/test_vllm_stages.py",),
    ),
    Bug(
        "P1",
        "tensor ranks share what one stage alone has twice",
        f"{VLLM}/stages.py",
        r"math\.gcd\(",
        r"max(",
        ("tests/unit/vllm/test_vllm_stages.py",),
    ),
    Bug(
        "P1",
        "a rank's block is taken for the scheduler's",
        f"{VLLM}/layout.py",
        r"group\.block_tokens \* \(contexts if _is_dealt_out\(described\) else 1\)",
        r"group.block_tokens",
        ("tests/unit/vllm/test_vllm_layout.py",),
    ),
    Bug(
        "P1",
        "an engine with stages is ahead by one step alone",
        f"{VLLM}/other_connectors.py",
        r"max\(DOUBTFUL_STEPS, 1 \+ self\._steps_ahead\)",
        r"DOUBTFUL_STEPS",
        ("tests/unit/vllm/test_vllm_doubts.py",),
    ),
    Bug(
        "P1",
        "a lease is good until the moment it ends",
        f"{KVCLIENT}/sequences.py",
        r"found\.lease\.expires_monotonic_s - LEASE_SPARE_S",
        r"found.lease.expires_monotonic_s",
    ),
    # ------------------------------------------------------------ P2: every failure is a miss within its deadline
    Bug(
        "P2",
        "a stage that cannot be cached leaves the others waiting",
        f"{VLLM}/stages.py",
        r"finally: told = gather\(mine\)",
        r"finally: pass\n    told = gather(mine)",
        ("tests/unit/vllm/test_vllm_stages.py",),
    ),
    Bug("P2", "a server that is late is asked on", INQUIRIES, r"self\._shut_gate\(asked\.link, Overdue\(\)\)", r"pass"),
    Bug(
        "P2",
        "a lost session stays in use",
        INQUIRIES,
        r"if isinstance\(problem, Lost\): self\._shut_gate\(link, problem\)",
        r"pass",
    ),
    Bug(
        "P2",
        "a patience below a millisecond is for ever",
        f"{TRANSPORT}/lane.py",
        r"int\(left_s \* 1000\) \+ 1",
        r"int(left_s * 1000)",
    ),
    Bug(
        "P2",
        "deadlines wake nobody",
        f"{KVCLIENT}/base/loop.py",
        r"self\._wake_at_s = min\(self\._wake_at_s, waiter\.due_s\)",
        r"pass",
    ),
    Bug(
        "P2",
        "a wait on a lost session has no end",
        f"{TRANSPORT}/session.py",
        r"if self\.lost is not None: self\._loop\.fail\(waiter, self\.lost\) else:",
        r"if True:",
    ),
    Bug(
        "P2",
        "an async lookup that is late does not trip",
        f"{TRANSPORT}/calls.py",
        r"self\._connection\.trip\(overdue\.why\)",
        r"pass",
    ),
    Bug(
        "P2",
        "who is late to notice undoes a reconnect",
        f"{TRANSPORT}/gate.py",
        r"if shut is None or \(link is not None and shut is not link\):",
        r"if shut is None:",
    ),
    Bug("P2", "an unexpected error in a part is waited for", JOBS, r"loop\.settle\(ended, nothing\)", r"pass"),
    # ------------------------------------------------------------ P3: a dead engine's mappings are freed
    Bug(
        "P3",
        "a lane that was shut keeps its socket",
        f"{TRANSPORT}/lane.py",
        r"(def _leave\(self\) -> None: )if self\._shut:",
        r"\1if False:",
    ),
    # ------------------------------------------------------------ P5: leases that nobody uses fill a tier
    Bug(
        "P5",
        "the lease of an interrupted lookup is kept",
        f"{TRANSPORT}/lane.py",
        r"elif isinstance\(reply, Found\) and reply\.lease:",
        r"elif False:",
    ),
    Bug(
        "P5",
        "a lease that comes late is kept",
        f"{TRANSPORT}/transports.py",
        r"case Found\(lease=lease\) if lease:",
        r"case Found(lease=lease) if False:",
    ),
    # ------------------------------------------------------------ P7: every request gets one reply
    Bug(
        "P7",
        "replies are told twice",
        f"{TRANSPORT}/lane.py",
        r"taken, self\._arrived = self\._arrived, \[\]",
        r"taken = list(self._arrived)",
    ),
    Bug(
        "P7",
        "one answer is waited for until the last has come",
        INQUIRIES,
        r"while self\._asked and not self\._answered and",
        r"while self._asked and",
    ),
    # ------------------------------------------------------------ P8: a prompt hits from any process, after any restart
    Bug(
        "P8",
        "a namespace depends on the order of a mapping",
        f"{KVCLIENT}/keys.py",
        r"sorted\(items, key=lambda entry: entry\[0\]\)",
        r"items",
    ),
    Bug(
        "P8",
        "keys depend on PYTHONHASHSEED",
        f"{KVCLIENT}/keys.py",
        r"return parent or _chain_start\(algorithm, chunk_tokens, extra\)",
        r'return parent or _chain_start(algorithm, chunk_tokens, extra + str(hash("chain")).encode())',
    ),
    Bug(
        "P8",
        "an answer outlives its server",
        f"{KVCLIENT}/sequences.py",
        r" and \(lease is None or self\._client\.honours\(lease\)\)",
        r"",
    ),
)

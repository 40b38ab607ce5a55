"""Deliberate bugs in what the server does with sums and with chunks that are found wrong. Asked as in service.py."""

from tests.drill import service
from tests.drill.bugs import Bug
from tests.drill.service import DISK, HOLDINGS, REQUESTS

TRANSFERS, MISMATCHES = f"{REQUESTS}/transfers.py", f"{REQUESTS}/mismatches.py"
notice = service.notice

BUGS = (
    Bug("P1", "wrong shards of a retrieve are ignored", TRANSFERS, r"if not wrong: return \[\]", r"return []"),
    Bug(
        "P1",
        "a chunk that a retrieve found wrong stays",
        MISMATCHES,
        r"drop\(core, job\.space\.digest, [^\n]*",
        r"pass",
    ),
    Bug(
        "P1",
        "the last wrong chunk of a retrieve goes, and the first one stays",
        MISMATCHES,
        r"min\(\(node for node, _ in wrong\)",
        r"max((node for node, _ in wrong)",
    ),
    Bug(
        "P1",
        "a retrieve names the last wrong chunk, not the first",
        TRANSFERS,
        r"min\(node\.depth for node, _ in wrong\)",
        r"max(node.depth for node, _ in wrong)",
    ),
    Bug(
        "P1",
        "chunks are said to be right of which nothing was copied",
        TRANSFERS,
        r"if not done\.bytes:",
        r"if False:",
    ),
    Bug(
        "P1",
        "of all that a scrub found wrong only the first chunk goes",
        MISMATCHES,
        r"for space, node, _ in wrong:",
        r"for space, node, _ in wrong[:1]:",
    ),
    Bug(
        "P1",
        "a retrieve that was cut off names chunks of the wrong place",
        TRANSFERS,
        r"job\.chain\[position\]",
        r"job.space.chain(job.tail)[position]",
    ),
    Bug(
        "P1",
        "leases on a wrong chunk live on",
        f"{REQUESTS}/dropped_chunks.py",
        r"_end_below\(core, space, below, error, now_ns\)(?= rest)",
        r"pass",
    ),
    Bug(
        "P1",
        "a chunk that a write found wrong stays",
        f"{DISK}/mover.py",
        r"mismatches\.drop\(core, job\.space\.digest, job\.node, now_ns\)",
        r"pass",
    ),
    Bug(
        "P1",
        "what was read from disk has no sum",
        f"{HOLDINGS}/disk_chunks.py",
        r"slot, sums\[index\]\)",
        r"slot, NO_SUM)",
    ),
    Bug(
        "P1",
        "every part of a chunk that was read has the first one's sum",
        f"{HOLDINGS}/disk_chunks.py",
        r"slot, sums\[index\]\)",
        r"slot, sums[0])",
    ),
    Bug(
        "P1",
        "what was stored has no sum",
        f"{HOLDINGS}/chunks.py",
        r"pending\.slots\[part\], payload_sum\)",
        r"pending.slots[part], NO_SUM)",
    ),
    Bug(
        "P1",
        "the sums of a store are given to its parts in another order",
        TRANSFERS,
        r"zip\(mine, sums, strict=True\)",
        r"zip(sorted(mine), sums, strict=True)",
    ),
    Bug(
        "P8",
        "a retrieve names the chunks before those that it reads",
        TRANSFERS,
        r"(keys = \[node\.key for node in )chain\[span\.first : span\.last\]",
        r"\1chain[: span.last - span.first]",
    ),
    Bug(
        "P8",
        "a retrieve names the parts of another shard",
        TRANSFERS,
        r"names_hash\(job\.space\.digest, part\.group, part\.shard, keys\)",
        r"names_hash(job.space.digest, part.group, 0, keys)",
    ),
)

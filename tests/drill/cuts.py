"""Deliberate bugs in how a large subtree is cut off and forgotten in pieces. Its own tests are asked first."""

from tests.drill import service
from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by
from tests.drill.service import DISK, HOLDINGS, OPERATORS, REQUESTS

CHUNKS = f"{HOLDINGS}/chunks.py"
CUTS, SPACE = "kvserver/index/subtrees.py", "kvserver/index/space.py"
OWN_TESTS = ("tests/unit/service/test_cut_pieces.py", "tests/unit/service/test_scrub.py")


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    return copy.failing_test(OWN_TESTS) or service.hunt(copy)


BUGS = (
    Bug(
        "P1",
        "a prefix is cut off without what continues it",
        SPACE,
        r"return bool\(self\.cuts\) and [^\n]*",
        "return False",
    ),
    Bug("P1", "a lookup finds what was cut off", SPACE, r"while self\.cuts and chunks:", r"while False:"),
    Bug(
        "P1",
        "a chunk that was cut off is found by its key",
        SPACE,
        r"return None if node is None or self\.is_cut\(node\) else node",
        r"return node",
    ),
    Bug(
        "P8",
        "a store goes on behind a chunk that was cut off",
        f"{REQUESTS}/transfers.py",
        r"space\.find\(request\.parent\)",
        r"space.nodes.get(request.parent)",
    ),
    Bug(
        "P8",
        "a store counts chunks as held that were cut off",
        f"{REQUESTS}/transfers.py",
        r"job\.space\.live_chunks\(job\.walk\)",
        r"len(job.walk)",
    ),
    Bug(
        "P8", "what is being stored below a cut is sealed", CHUNKS, r"self\._drop_pendings_below\(space, node\)", "pass"
    ),
    Bug(
        "P1",
        "whoever reads below a cut is not moved with it",
        f"{REQUESTS}/dropped_chunks.py",
        r"_move_pins\(core, space, below, rest\)(?= return)",
        "pass",
    ),
    Bug(
        "P4",
        "the next brain finds what was cut off",
        CHUNKS,
        r"self\.withdrawn\.extend\([^\n]*"
        r"(?= if node in self\.marks: self\.withdrawn\.append\(self\.marks\.give_back\(node\)\) assert)",
        "pass",
    ),
    Bug(
        "P1",
        "what was cut off is written to disk, or moves there",
        CHUNKS,
        r" and not space\.is_cut\(node\)(?= def may_ever_fit)",
        "",
    ),
    Bug(
        "P1",
        "a lease on what was cut off lives on",
        f"{REQUESTS}/dropped_chunks.py",
        r"\* KEY_BYTES\] == below\.top\.key",
        "* KEY_BYTES] == b'x'",
    ),
    Bug(
        "P1",
        "a lease of no chain lives on below a cut",
        f"{REQUESTS}/dropped_chunks.py",
        r"return lease\.tail in below",
        "return False",
    ),
    Bug(
        "P1",
        "chunks above a cut are free while a retrieve reads them",
        CHUNKS,
        r"if cut\.above\.depth and any\(",
        "if False and any(",
    ),
    Bug(
        "P1",
        "the clear of a prefix is answered before its chunks have gone",
        f"{OPERATORS}/clear_namespaces.py",
        r'core\.number\("disk"\), core\.chunks\.still_forgetting\(of\)',
        r'core.number("disk"), []',
    ),
    Bug(
        "P1",
        "a chunk goes that a retrieve below a cut reads",
        CHUNKS,
        r"node\.children is None and not node\.pins:(?= self\.remove\(rest, node\))",
        "node.children is None:",
    ),
    Bug("P5", "branches below a cut are never forgotten", CUTS, r"self\.todo\.extend\(children\)", "pass"),
    Bug(
        "P5", "one event forgets all that was cut off", CHUNKS, r"\(rest, cut, self\._at_once\)", "(rest, cut, 1 << 40)"
    ),
    Bug(
        "P5",
        "what was cut off is never forgotten to the end",
        f"{OPERATORS.rsplit('/', 1)[0]}/service.py",
        r"core\.clears\.waiting or core\.chunks\.forgetting",
        "core.clears.waiting",
    ),
    Bug(
        "P1",
        "recovery hangs chunks below a cut",
        f"{DISK}/recovery.py",
        r"if above == NO_PARENT else space\.find\(above\)",
        "if above == NO_PARENT else space.nodes.get(above)",
    ),
    Bug(
        "P1",
        "recovery meets a chunk that was cut off",
        f"{DISK}/recovery.py",
        r"core\.chunks\.make_way\(space, key\)",
        "pass",
    ),
    Bug(
        "P1",
        "a scrub reads what was cut off",
        CHUNKS,
        r"return None if space is None or space\.is_cut\(node\) else space",
        "return space",
    ),
    Bug(
        "P8",
        "a chunk that was cut off hinders the same one",
        CHUNKS,
        r"if node is not None and not self\.make_way\(space, key\):",
        "if node is not None:",
    ),
    Bug(
        "P5",
        "what is left of two cuts is mixed up",
        CHUNKS,
        r"while at is not None and space\.has\(at\) and",
        "while at is not None and at.depth and",
    ),
    Bug(
        "P5",
        "a cut above another one forgets what the first keeps",
        CHUNKS,
        r"if origin is space and is_below\(above, node\):",
        "if False:",
    ),
    Bug(
        "P8",
        "subscribers are not told of what was cut off",
        CHUNKS,
        r"self\.count\(space, node, -1\)(?= self\.withdrawn\.extend)",
        "pass",
    ),
    Bug(
        "P8",
        "ARC remembers what was cut off",
        f"{HOLDINGS}/eviction.py",
        r"is not None and not was_cut:",
        "is not None:",
    ),
    Bug(
        "P5",
        "a guarantee counts what was cut off",
        f"{HOLDINGS}/accounts.py",
        r"for space in dict\.fromkeys\(chain\(retired, [^\n]*",
        "for space in retired:",
    ),
    Bug(
        "P8",
        "the server is drained before a cut is forgotten",
        f"{OPERATORS}/server_drain.py",
        r"if core\.chunks\.forgetting:",
        "if False:",
    ),
    Bug(
        "P8",
        "what was cut off counts as never stored",
        f"{REQUESTS}/miss_reason.py",
        r"is_known = key in space\.nodes or ",
        "is_known = ",
    ),
)

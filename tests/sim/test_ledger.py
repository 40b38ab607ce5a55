"""The chunks that a restarted brain may lose, as the simulated ledger tells it."""

from kvserver.tiers.records import DOCUMENT_FORMAT, NO_PARENT, GroupDocument, NamespaceDocument, Record, encode_document

from .content import key_of
from .ledger import Ledger, may_be_lost, survivors
from .memory import Arena
from .shapes import GroupShape, Shape

NAMESPACE = b"n" * 32
SHAPE = Shape("pair", 6, 2, (GroupShape(3, "full", 0, 2, 1, 2, (700, 700)),))
DOCUMENT = encode_document(
    NamespaceDocument(DOCUMENT_FORMAT, NAMESPACE, 6, [GroupDocument(3, "full", 0, 2, 1, [[(2, 700)], None])])
)


def put(ledger: Ledger, first: int, chunk: int, generation: int) -> set[int]:
    """Seals both shards of a first chunk."""
    offsets = {first, first + 4096}
    for shard, offset in enumerate(sorted(offsets)):
        where = offset, NAMESPACE, key_of((chunk,)), NO_PARENT, 0, shard
        ledger.put(Record(*where, 2800, 0, 4096, generation, 5))
    return offsets


def test_what_a_namespace_left_may_be_lost_when_it_has_come_again_and_what_came_since_may_not() -> None:
    ledger, shapes = Ledger(Arena(1 << 16, 1)), {NAMESPACE: SHAPE}
    ledger.documents[3] = DOCUMENT
    old = put(ledger, 8192, 1, 11)
    assert (survivors(ledger, shapes), may_be_lost(ledger, shapes)) == (old, set())
    ledger.drop_document(3)
    ledger.documents[5] = DOCUMENT
    new = put(ledger, 24576, 2, 13)
    ledger.read_again()
    assert (survivors(ledger, shapes), may_be_lost(ledger, shapes)) == (old | new, old)
    ledger.withdraw(8192)
    assert may_be_lost(ledger, shapes) == {12288}

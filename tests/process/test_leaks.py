"""No leaks: memory stays flat over many operations. `python -m tests.process.leaks` makes a hundred thousand."""

from tests.process.leaks import run

OPERATIONS = 10_000
ALWAYS = ("found", "not found", "found later", "retrieved ", "stored ", "refused", "registered", "cleared", "visited")


def test_memory_stays_flat_over_many_operations() -> None:
    seen = run(OPERATIONS)["seen"]
    assert [what for what in ALWAYS if not seen.get(what)] == []
    assert "not refused" not in seen
    assert seen["stored "] > OPERATIONS // 8

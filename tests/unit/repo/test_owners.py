"""Only an object writes its own attributes, in the rooms that decide."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVICE = ROOT / "kvserver" / "service"

ALLOWED = {
    "telling/counters.py twin.counts": "Histogram.copy() fills the copy that it has just made",
    "telling/counters.py twin.sum": "Histogram.copy() fills the copy that it has just made",
}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            yield target
        case ast.withitem(optional_vars=ast.expr() as target) | ast.NamedExpr(target=target):
            yield target


def foreign_writes(source: str) -> list[str]:
    """Attributes of anything but `self` that this source assigns to."""
    found = []
    waiting = [target for node in ast.walk(ast.parse(source)) for target in _targets(node)]
    while waiting:
        match waiting.pop():
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                waiting += parts
            case ast.Starred(value=part):
                waiting.append(part)
            case ast.Attribute(value=ast.Name(id="self")):
                pass
            case ast.Attribute() as attribute:
                found.append(ast.unparse(attribute))
    return found


def test_foreign_writes_are_seen() -> None:
    source = "a.b = 1\nc, (d.e, *f.g) = 2\nself.h = 3\ndel i.j\nk.l += 4\nm = n.o\nfor p.q in r: pass"
    assert sorted(foreign_writes(source)) == ["a.b", "d.e", "f.g", "i.j", "k.l", "p.q"]


def test_no_function_writes_attributes_of_an_object_that_it_does_not_own() -> None:
    found = {
        f"{path.relative_to(SERVICE)} {attribute}"
        for path in SERVICE.rglob("*.py")
        for attribute in foreign_writes(path.read_text())
    }
    assert found == set(ALLOWED)

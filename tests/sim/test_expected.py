"""EXPECTED names every kind of event, request, command, reply, effect, order, report and wish."""

from typing import get_args

import pytest

from kvserver.service.base import effects, events
from kvserver.wire import admin, messages, orders

from .expected import EXPECTED


@pytest.mark.parametrize(
    ("word", "union"),
    [
        ("event", events.Event),
        ("request", messages.Request),
        ("command", admin.AnyCommand),
        ("reply", messages.Reply | admin.Outcome),
        ("effect", effects.Effect),
        ("order", orders.Order),
        ("report", orders.Report),
        ("wish", orders.Wish),
    ],
)
def test_no_kind_is_left_out(word: str, union: object) -> None:
    kinds = {kind.__name__ for kind in get_args(union)}
    assert kinds
    assert {name.split()[1] for name in EXPECTED if name.startswith(f"{word} ")} == kinds

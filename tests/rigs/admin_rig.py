"""Operator commands for a Rig."""

from typing import Any

from kvserver.service.base.events import Commanded
from kvserver.service.operators.commands import COMMAND_ID
from kvserver.wire.admin import AnyCommand, ClearNamespace, Held, Pin
from tests.rigs.brain_rig import NAMESPACE, Rig


def command(rig: Rig, wanted: AnyCommand) -> Any:
    """Sends a command; returns its outcome, or None when it has not come yet."""
    peer = rig.number()
    rig.handle(Commanded(peer, "token ops", wanted))
    return rig.answers.get((peer, COMMAND_ID))


def pinned(rig: Rig, keys: bytes, ttl_ms: int = 5_000) -> Held:
    outcome = command(rig, Pin(namespace=NAMESPACE, keys=keys, ttl_ms=ttl_ms))
    assert isinstance(outcome, Held), outcome
    return outcome


def clear_prefix(rig: Rig, key: bytes) -> Any:
    return command(rig, ClearNamespace(namespace=NAMESPACE, key=key))

"""A foreign value in a Valkey at the place of a namespace's note."""

import pytest

from kvserver.remote.store import StoreError
from kvserver.remote.valkey import Settings, ValkeyStore
from tests.rigs.remote_chunks import NAMESPACE
from tests.rigs.valkey_server import ValkeyServer
from tests.unit.remote.conftest import PATIENT


@pytest.mark.parametrize(("command", "values"), [("RPUSH", ["one"]), ("HSET", ["one", "two"]), ("SADD", ["one"])])
def test_a_value_of_another_type_is_an_error_when_a_note_is_made(
    valkey: ValkeyServer, command: str, values: list[str]
) -> None:
    """It reads as no note. Were it only the note of somebody else, it would be read again at once, for ever."""
    store = ValkeyStore(Settings((("127.0.0.1", valkey.port),), prefix=f"foreign-{command}", **PATIENT))
    valkey.ask(command, ":".join((f"foreign-{command}", *NAMESPACE.pieces(), "note")), *values)
    assert store.notes([NAMESPACE]) == [None]
    with pytest.raises(StoreError) as problem:
        store.make_note(NAMESPACE, b"note")
    assert problem.value.code == "remote-refused"
    store.replace_note(NAMESPACE, b"note")
    assert store.notes([NAMESPACE]) == [b"note"]
    assert not store.make_note(NAMESPACE, b"another")
    store.close()

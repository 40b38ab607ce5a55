"""Servers with a plug-in as their store: one that keeps the contract, and some that harm nobody but themselves."""

from pathlib import Path

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import Server, until

CHUNKS = 5
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "stores"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers find the examples, as they find what is installed beside them."""
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{EXAMPLES.parents[1]}")


def server_with(plugin: str) -> Server:
    between = "&" if "?" in plugin else "?"
    return Server(remotes=f"mine=plugin://{plugin}{between}tokens_min=0&write=through")


def counted(server: Server, name: str) -> int:
    found = server.status().counters[name]
    assert isinstance(found, int)
    return found


def test_two_servers_share_a_plug_in_of_sixty_lines(examples: None, tmp_path: Path) -> None:
    story = prompt(3, CHUNKS)
    plugin = f"sqlite_store:SqliteStore?path={tmp_path}/shared.db"
    with (
        server_with(plugin) as one,
        server_with(plugin) as other,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
    ):
        first.store(story)
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        until("the chunks to come", lambda: second.lookup(story).chunks == CHUNKS)
        assert second.retrieve(story) == CHUNKS
        assert first.client.clear(first.namespace) == CHUNKS
        until("the copies of the other server to go", lambda: second.lookup(story).chunks == 0)


@pytest.mark.parametrize("kind", ["EndsTheProcess", "TellsTooMuch", "TellsNonsense"])
def test_a_plug_in_whose_mover_ends_costs_what_is_in_its_store_and_nothing_else(examples: None, kind: str) -> None:
    story, unknown = prompt(4, CHUNKS), prompt(5, CHUNKS)
    with server_with(f"tests.rigs.bad_plugins:{kind}") as server, Engine(server.path).ready() as engine:
        brain = server.brain_pid()
        until("a mover", lambda: server.status().remote.usable)
        assert engine.store(story).chunks == CHUNKS
        until("the mover to end", lambda: engine.lookup(unknown).chunks == 0 and "mover gone" in server.log())
        assert engine.lookup(story).chunks == CHUNKS
        assert engine.retrieve(story) == CHUNKS
        assert counted(server, "mover_restarts") > 0
        until("another mover", lambda: server.status().remote.usable)
        assert server.brain_pid() == brain


@pytest.mark.parametrize("kind", ["NeedsMuch", "Nothing", "Raises"])
def test_a_server_whose_plug_in_cannot_be_used_says_so_and_serves_without_it(examples: None, kind: str) -> None:
    story = prompt(6, CHUNKS)
    with server_with(f"tests.rigs.bad_plugins:{kind}") as server, Engine(server.path).ready() as engine:
        engine.store(story)
        assert engine.retrieve(story) == CHUNKS
        until("the reason to be told", lambda: "planted" in server.log() or "no attribute" in server.log())
        until("the brain to hear of it", lambda: not server.status().remote.usable)


def test_other_bytes_of_a_plug_in_reach_no_engine(examples: None, tmp_path: Path) -> None:
    story = prompt(7, CHUNKS)
    right, wrong = (f"tests.rigs.bad_plugins:{kind}?path={tmp_path}" for kind in ("InMemory", "OtherBytes"))
    with (
        server_with(right) as one,
        server_with(wrong) as other,
        Engine(one.path).ready() as first,
        Engine(other.path).ready() as second,
    ):
        first.store(story)
        until("the chunks to be in the store", lambda: counted(one, "remote_writes") == CHUNKS)
        until("one to be found wrong", lambda: second.lookup(story).chunks == 0 and "read digest" in failures(other))
        assert counted(other, "remote_reads") == 0
        assert second.retrieve(story) == 0
        assert first.retrieve(story) == CHUNKS


def failures(server: Server) -> object:
    return server.status().counters["remote_failures"]

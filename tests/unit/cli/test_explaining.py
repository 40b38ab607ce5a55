"""`kvserver explain`: the question on the command line, and the answer in sentences."""

import json
from pathlib import Path
from typing import get_args

import pytest

from kvclient.keys import chunk_keys
from kvserver.cli.explain import CAUSES, ENDINGS, REMOTE, explain, sentences
from kvserver.errors import ConfigError
from kvserver.service.requests.miss_reason import Ending
from kvserver.service.requests.remote_reason import RemoteReason
from kvserver.service.telling.evicted_keys import Cause
from kvserver.wire.explanation import Explanation, decode_explanations
from kvserver.wire.messages import Explain, GroupBlocks
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, Client, Rig, chain, ids, key

TOKENS = list(range(700, 700 + 2 * CHUNK_TOKENS + 5))


class Asking:
    """The part of kvclient.Client that explain() needs, over a rig."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def explain(self, keys: bytes, namespace: bytes = b"") -> list[Explanation]:
        return decode_explanations(self._client.ask(Explain(self._client.rig.number(), namespace, keys)).document)


def ask(client: Client, keys: list[str] | None = None, *, tokens: str = "", namespace: str = "") -> list[str]:
    return explain(Asking(client), keys=keys or [], tokens=tokens, namespace=namespace)  # type: ignore[arg-type]


def a_client() -> Client:
    return Client(Rig()).register()


def test_every_ending_and_every_cause_has_its_sentence() -> None:
    assert ENDINGS.keys() == set(get_args(Ending))
    assert CAUSES.keys() == set(get_args(Cause))
    assert REMOTE.keys() == set(get_args(RemoteReason))


def test_a_chunk_that_the_remote_store_did_not_bring_has_a_sentence_about_it() -> None:
    found = Explanation(
        namespace="ab",
        chunk_tokens=CHUNK_TOKENS,
        chunks_asked=1,
        chunks=0,
        chunks_on_disk=0,
        why="absent",
        key="cd",
        remote="aside",
        remote_s=1.52,
    )
    why = "did not have it, or it could not be read, or was not wanted (docs/remote.md)"
    expected = f"  the remote store {why}; it is not asked for again for 1.5 s"
    assert sentences(found)[-1] == expected


def test_each_of_several_remote_stores_has_a_sentence() -> None:
    found = Explanation(
        namespace="ab",
        chunk_tokens=CHUNK_TOKENS,
        chunks_asked=1,
        chunks=0,
        chunks_on_disk=0,
        why="absent",
        key="cd",
        remotes={"near": ("aside", 1.52), "far": ("unannounced", 0.0)},
    )
    near, far = sentences(found)[-2:]
    assert near.startswith("  the remote store near did not have it")
    assert near.endswith("it is not asked for again for 1.5 s")
    assert far == "  the remote store far is not asked for it, because no server has announced that it is there"


@pytest.mark.parametrize("write", [json.dumps, lambda tokens: "\n".join(map(str, tokens)) + "\n"])
def test_a_prompt_is_named_by_its_tokens_as_engines_name_it(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    client, file = a_client(), tmp_path / "tokens"
    file.write_text(write(TOKENS))
    keys = chunk_keys(TOKENS, CHUNK_TOKENS)
    client.store(key(keys, 0))
    said = "\n".join(ask(client, tokens=str(file)))
    assert f"1 of 2 chunks of {CHUNK_TOKENS} tokens would be served: {CHUNK_TOKENS} tokens" in said
    assert f"next chunk {key(keys, 1).hex()}" in said
    assert "never stored" in said


def test_a_namespace_may_be_named_by_its_first_digits() -> None:
    client = a_client()
    Client(client.rig, engine="other").register(namespace=bytes(32))
    wanted = [chain(1, 1).hex()]
    assert sum(line.startswith("namespace ") for line in ask(client, wanted)) == 2
    assert ask(client, wanted, namespace=NAMESPACE.hex()[:5])[0] == f"namespace {NAMESPACE.hex()}"
    assert "no namespace of that name" in ask(client, wanted, namespace="abc")[0]
    assert "nothing was ever registered" in "\n".join(ask(client, wanted, namespace="ab" * 32))


def test_a_key_that_is_held_under_another_namespace_is_said_so() -> None:
    client = a_client()
    Client(client.rig, engine="other").register(namespace=bytes(32))
    client.store(chain(1, 1))
    said = ask(client, [chain(1, 1).hex()], namespace="00000000")
    assert any(NAMESPACE.hex() in line and "engines that should share differ" in line for line in said)


def test_a_chunk_that_is_being_stored_is_said_to_be() -> None:
    client = a_client()
    client.rig.movers_copy = False
    client.ask(client.storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    assert any("is being stored" in line for line in ask(client, [chain(1, 1).hex()]))


def test_a_question_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    client, file = a_client(), tmp_path / "tokens"
    file.write_text("the quick brown fox")
    with pytest.raises(ConfigError, match="name keys"):
        ask(client)
    with pytest.raises(ConfigError, match="expected token ids"):
        ask(client, tokens=str(file))
    with pytest.raises(ConfigError, match="64 lower-case"):
        ask(client, ["abc"])
    file.write_text("[1, 2]")
    assert "less than a chunk" in ask(client, tokens=str(file))[0]

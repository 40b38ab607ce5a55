"""Prefixes that DRAM has lost and disk still has: the tokens are the same, and no step waits for the reads.

The server writes through, is killed with its arena, and is started again on the same directory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, resume, stop, until

TOKENS = 8
LENGTH = 900
PAGE_BYTES = 4096
SUPERBLOCKS_BYTES = 2 * PAGE_BYTES
OTHER = 300
"""Length of a second prompt, whose hits show that the engine asks the server again."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with CheckedServer(
        arena_bytes=64 << 20,
        disk_paths=str(tmp_path_factory.mktemp("disk")),
        disk_bytes=64 << 20,
        disk_segment_bytes=8 << 20,
        disk_write_policy="through",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    until("the disk", lambda: server.status().disk_state == "ready")
    with Engine(models / "llama", server.path, block_size=32) as running:
        yield running


@pytest.fixture(scope="module")
def computed(engine: Engine, server: Server) -> Answer:
    """The engine's own answer. Afterwards the disk holds this prompt, and the one that looks_up() asks for."""
    answer = ask(engine)
    assert answer.cached_tokens == 0
    engine.generate([prompt(2, OTHER)], tokens=1)
    until("its chunks to be on disk", lambda: server.status().chunks_on_disk >= LENGTH // 256 + OTHER // 256)
    return answer


@pytest.fixture
def only_on_disk(engine: Engine, computed: Answer, server: Server) -> Answer:
    """The server was killed and its arena is lost; the engine has forgotten the prompt."""
    server.kill()
    server.start()
    until("the disk", lambda: server.status().disk_state == "ready")
    assert server.status().arena.used_bytes == 0
    assert server.status().chunks_on_disk >= LENGTH // 256
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    until("the engine to look up again", lambda: looks_up(engine))
    return computed


def looks_up(engine: Engine) -> bool:
    """True if lookups hit again: the scheduler connects by itself, some time before or after its worker."""
    engine.evict()
    return engine.generate([prompt(2, OTHER)], tokens=1)[0].cached_tokens > 0


def ask(engine: Engine) -> Answer:
    return engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]


def test_after_a_restart_the_prefix_comes_from_disk(engine: Engine, only_on_disk: Answer, server: Server) -> None:
    read, before = disk_reads(server), Brought.by(engine)
    found = ask(engine)
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, only_on_disk)
    assert disk_reads(server) == read + LENGTH // 256
    assert before.grown(engine) == [whole_chunks(LENGTH)] * 2, "all of it from disk"
    until("the server to be at rest", lambda: settled(server))
    engine.evict()
    before = Brought.by(engine)
    assert_same(ask(engine), only_on_disk)
    assert before.grown(engine) == [whole_chunks(LENGTH), 0], "it is in DRAM now"


def test_others_go_on_while_a_prefix_is_read(engine: Engine, only_on_disk: Answer, server: Server) -> None:
    mover = server.disk_mover_pid()
    stop(mover)
    try:
        engine.call("add", "from disk", prompt(1, LENGTH), TOKENS)
        until("the load to be under way", lambda: server.status().retrieves == 1)
        engine.call("add", "other", prompt(3, OTHER), TOKENS)
        until("the other request to finish", lambda: "other" in engine.call("drain"))
        assert server.status().retrieves == 1
    finally:
        resume(mover)
    until("the request to finish", lambda: "from disk" in engine.call("drain"))
    engine.evict()
    found = ask(engine)
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, only_on_disk)


def test_bytes_that_changed_on_disk_are_noticed_and_computed_again(
    engine: Engine, only_on_disk: Answer, server: Server
) -> None:
    flip_a_bit_of_each_page(Path(str(server.settings["disk_paths"])) / "kvserver.store")
    before = server.status().counters["digest_mismatches"]
    assert_same(ask(engine), only_on_disk)
    assert server.status().counters["digest_mismatches"] != before
    until("the server to be at rest", lambda: settled(server))
    engine.evict()
    found = ask(engine)
    assert found.cached_tokens == whole_chunks(LENGTH), "it is stored again"
    assert_same(found, only_on_disk)


def flip_a_bit_of_each_page(payloads: Path) -> None:
    with payloads.open("r+b") as file:
        content = bytearray(file.read())
        for at in range(SUPERBLOCKS_BYTES, len(content), PAGE_BYTES):
            content[at + 7] ^= 2
        file.seek(0)
        file.write(content)


class Brought(NamedTuple):
    """The engine's hit counters."""

    tokens: float
    from_disk: float
    by_source: tuple[float, ...]
    """vLLM's own counters, from 0.32 on: from disk, from DRAM."""

    @classmethod
    def by(cls, engine: Engine) -> "Brought":
        counts = engine.call("metrics")
        told = "vllm:prompt_tokens_cached_by_source"
        by_source = tuple(counts[f"{told}:{source}"] for source in ("disk", "host")) if told in counts else ()
        return cls(counts["vllm:kvserver_tokens_retrieved"], counts["vllm:kvserver_tokens_from_disk"], by_source)

    def grown(self, engine: Engine) -> list[float]:
        """Tokens since then: all, and those from disk."""
        now = Brought.by(engine)
        tokens, from_disk = now.tokens - self.tokens, now.from_disk - self.from_disk
        if now.by_source:
            told = [after - before for after, before in zip(now.by_source, self.by_source, strict=True)]
            assert told == [from_disk, tokens - from_disk]
        return [tokens, from_disk]


def disk_reads(server: Server) -> int:
    count = server.status().counters["disk_reads"]
    assert isinstance(count, int)
    return count

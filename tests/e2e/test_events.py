"""Routers that read vLLM's own KV events know what the server holds, in vLLM's words and with vLLM's hashes.

A subscriber takes in what vLLM publishes, with the decoders and the index that the other tests use too.
"""

import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import zmq

from tests.e2e.checks import prompt, settled
from tests.e2e.engine import Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until
from tests.rigs.router_decoders import Seen, dynamo, llm_d
from tests.rigs.router_index import Index
from tests.rigs.vllm_events import LATER, OF_REMOVALS, REQUIRED

BLOCK, CHUNK = 32, 256
LENGTH = 900
GROWN_BLOCKS = LENGTH // CHUNK * CHUNK // BLOCK
DISK_BYTES = 64 << 20


class Router:
    """A subscriber of one engine."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.index = Index()
        self.own: dict[int, tuple[int | None, list[int]]] = {}
        """The engine's own blocks: hash -> the hash before, and the tokens."""
        self.clears = 0

    def listen(self) -> None:
        while self._socket.poll(0):
            _, _, payload = self._socket.recv_multipart()
            seen = llm_d(payload)
            assert [it.hashes for it in dynamo(payload, block_size=BLOCK)] == [it.hashes for it in seen]
            self.index.take([it for it in seen if it.tier != "gpu" or it.tag == "AllBlocksCleared"])
            self.clears += sum(it.tag == "AllBlocksCleared" for it in seen)
            for it in seen:
                self._note_own(it)

    def _note_own(self, it: Seen) -> None:
        if it.tag == "BlockStored" and it.tier == "gpu":
            parent = it.parent
            for place, block in enumerate(it.hashes):
                self.own[block] = parent, it.tokens[place * BLOCK : (place + 1) * BLOCK]
                parent = block

    def blocks(self, tier: str) -> set[int]:
        self.listen()
        return {block for block, found in self.index.blocks if found == tier}

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kv-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """DRAM for few prompts. All that is stored goes to disk as well."""
    (folder / "disk").mkdir()
    with CheckedServer(
        arena_bytes=16 << 20,
        events_endpoint=f"ipc://{folder}/events",
        disk_paths=str(folder / "disk"),
        disk_bytes=DISK_BYTES,
        disk_segment_bytes=8 << 20,
        disk_write_policy="through",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def engine(models: Path, server: Server, folder: Path) -> Iterator[Engine]:
    until("the disk", lambda: server.status().disk_state == "ready")
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder}/vllm"}
    connector: dict[str, object] = {"events_endpoint": f"ipc://{folder}/events"}
    with Engine(models / "llama", server.path, connector=connector, block_size=BLOCK, kv_events_config=told) as running:
        yield running


@pytest.fixture(scope="module")
def router(engine: Engine, folder: Path) -> Iterator[Router]:
    """A subscriber that has heard the engine."""
    made = Router(f"ipc://{folder}/vllm")
    until("the subscription", lambda: bool(engine.generate([prompt(99, 40)], tokens=1)) and (made.listen() or made.own))
    yield made
    made.close()


def held(router: Router) -> set[int]:
    return router.blocks("cpu") | router.blocks("storage")


def test_what_is_stored_is_told_with_vllms_own_hashes_and_tokens(engine: Engine, router: Router) -> None:
    engine.generate([prompt(1, LENGTH)], tokens=1)
    until("the prompt to be told", lambda: len(router.blocks("cpu")) == GROWN_BLOCKS)  # the engine is idle by now
    for block in router.blocks("cpu"):
        parent, tokens = router.index.tokens[block]
        assert router.own[block] == (parent, list(tokens))


def test_what_has_left_dram_is_told_as_on_disk(engine: Engine, router: Router, server: Server) -> None:
    before = router.blocks("cpu")
    for seed in range(2, 9):
        engine.generate([prompt(seed, LENGTH)], tokens=1)
    until("the server to be at rest", lambda: settled(server))
    until("the first prompt to be told as on disk", lambda: stepped(engine) and before <= router.blocks("storage"))
    assert not before & router.blocks("cpu")


def test_after_vllm_cleared_its_own_cache_the_servers_chunks_are_told_again(engine: Engine, router: Router) -> None:
    before, clears = held(router), router.clears
    engine.evict()
    until("the clear", lambda: stepped(engine) and held(router) is not None and router.clears > clears)
    until("the server's chunks to be told again", lambda: stepped(engine) and before <= held(router))


def test_what_is_told_is_found(engine: Engine, router: Router) -> None:
    engine.evict()
    told = {block for block in held(router) if router.index.tokens[block][1][0] is not None}
    for seed in range(1, 9):
        blocks = blocks_of(router, prompt(seed, LENGTH))
        found = engine.generate([prompt(seed, LENGTH)], tokens=1)[0].cached_tokens
        assert found == len(blocks & told) * BLOCK


def test_after_a_restart_of_the_server_only_what_it_has_is_told(engine: Engine, router: Router, server: Server) -> None:
    assert router.blocks("cpu")
    server.kill()  # and the arena with it
    server.start()
    until("the disk", lambda: server.status().disk_state == "ready")
    until("DRAM to be told as empty", lambda: stepped(engine) and not router.blocks("cpu"))
    chunks = server.status().chunks_on_disk
    until("all to be told as on disk", lambda: stepped(engine) and len(router.blocks("storage")) == told_of(chunks))


def test_a_cleared_namespace_is_told_as_gone(engine: Engine, router: Router, server: Server) -> None:
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    engine.call("reset", True)
    until("all to be told as gone", lambda: stepped(engine) and not held(router))


def stepped(engine: Engine) -> bool:
    """The engine takes a few steps, and stores nothing."""
    return bool(engine.generate([prompt(99, 40)], tokens=1))


def told_of(chunks: int) -> int:
    return chunks * CHUNK // BLOCK


def blocks_of(router: Router, tokens: list[int]) -> set[int]:
    """A prompt's blocks, by what was told of their tokens."""
    by_content = {content: block for block, content in router.index.tokens.items()}
    found, parent = set(), None
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        parent = by_content.get((parent, tuple(tokens[start : start + BLOCK])))
        if parent is None:
            break
        found.add(parent)
    return found


def test_the_tables_of_vllms_classes_are_those_of_this_release(engine: Engine) -> None:
    fields, release = engine.call("event_fields"), version(packages_distributions()["vllm"][0])
    more = [name for since, names in LATER if since <= release for name in names]
    assert fields["BlockStored"] == (*REQUIRED, *more)
    assert fields["BlockRemoved"] == ("block_hashes", "medium", *(name for name in more if name in OF_REMOVALS))

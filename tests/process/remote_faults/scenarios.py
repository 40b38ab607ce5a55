"""Scenarios for remote stores under faults. Each runs until so many faults have happened, and returns what was seen."""

import multiprocessing
import random
import signal
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from glide_sync import GlideClient, GlideClientConfiguration, NodeAddress

from kvserver.remote.directory import UNFINISHED, DirectoryStore
from kvserver.remote.objects.driver import Driver, Start
from kvserver.remote.objects.store import Waits
from kvserver.remote.store import Store
from kvserver.remote.valkey import Settings, ValkeyStore
from tests.process.campaign import counted
from tests.process.remote_faults.life import Life
from tests.rigs import object_stores
from tests.rigs.fault_proxy import FaultProxy
from tests.rigs.mooncake_server import ListableObjects, MooncakeServer, open_mooncake
from tests.rigs.valkey_server import ValkeyServer

DEADLINES = {"probe_s": 0.25, "bulk_s": 0.25, "note_s": 0.25, "connect_s": 0.25}
TURNS_A_FAULT = 60
"""Turns within which a fault must have happened: a campaign without faults shows nothing."""
VANDAL_MS = 10_000
"""The library itself gives up after 250 ms, which a busy machine takes now and then."""
PART = 500
"""Faults in the stream to a Valkey after which a new process goes on."""


def run_proxy(faults: int, seed: int, chance: float = 0.04) -> str:
    """A Valkey behind a proxy that damages the stream, in processes that end after some of the faults.

    The store's library aborts its process when the text of an error has a zero byte (valkey-glide 2.6.0). A server gets
    a new mover then. Here such a part is counted, and done again with other dice."""
    seen: Counter[str] = Counter()
    done = parts = 0
    while done < faults:
        count = min(PART, faults - done)
        part = _in_a_process(count, seed + 1_000_003 * parts, chance)
        parts += 1
        done += count if part else 0
        seen.update(part or {"library aborted": 1})
        assert parts <= 2 * (faults // PART + 1), "the library aborts more often than not"
    return counted(seen)


def _in_a_process(faults: int, seed: int, chance: float) -> Counter[str] | None:
    """Returns what was seen there; None if its library aborted it."""
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe(duplex=False)
    with ValkeyServer() as server:
        process = context.Process(target=_tell, args=(tells, server.port, faults, seed, chance))
        process.start()
        tells.close()
        try:
            seen: Counter[str] | None = told.recv()
        except EOFError:
            seen = None
        process.join()
    assert process.exitcode == (0 if seen else -signal.SIGABRT), f"seed {seed}: status {process.exitcode}"
    return seen


def _tell(tells: Connection, port: int, faults: int, seed: int, chance: float) -> None:
    tells.send(damaged_stream(port, faults, seed, chance))


def damaged_stream(port: int, faults: int, seed: int, chance: float = 0.04) -> Counter[str]:
    """A Valkey on this port, behind a proxy that damages the stream."""
    with FaultProxy(port, seed, chance) as proxy:
        life = Life(seed)
        store = ValkeyStore(Settings((("127.0.0.1", proxy.port),), **DEADLINES))
        return _lived(life, store, proxy, faults)


def run_http_proxy(faults: int, seed: int, chance: float = 0.04, *, kind: str) -> str:
    """The server of an object store behind a proxy that damages the stream."""
    rig = object_stores.KINDS[kind]
    with rig.server() as server, FaultProxy(server.port, seed, 0) as proxy:
        life = Life(seed)
        waits = Waits(probe_s=0.25, bulk_s=0.25, note_s=0.25, announced_every_s=0)
        store = rig.store(server, f"seed{seed}", port=proxy.port, waits=waits, only_looks=True)
        proxy.chance = chance
        return counted(_lived(life, store, proxy, faults))


def _lived(life: Life, store: Store, proxy: FaultProxy, faults: int) -> Counter[str]:
    """Uses the store until so many faults have happened, and closes it."""
    turns = 0
    while proxy.faults.total() < faults:
        life.turn(store)
        turns += 1
        assert turns < TURNS_A_FAULT * faults
    store.close()
    return Counter({**proxy.faults, **life.seen})


def run_objects(faults: int, seed: int, *, kind: str) -> str:
    """An object store whose objects somebody changes: flipped, cut, longer, zeroed, swapped, older, removed."""
    rig = object_stores.KINDS[kind]
    with rig.server() as server:
        prefix = f"seed{seed}"
        return _spoilt_objects(rig.store(server, prefix), rig.driver(server, prefix), faults, seed)


def run_mooncake(faults: int, seed: int) -> str:
    """A Mooncake Store whose objects somebody changes in the same ways."""
    with MooncakeServer() as server:
        return _spoilt_objects(open_mooncake(server), ListableObjects(server), faults, seed)


def _spoilt_objects(store: Store, vandal: Driver, faults: int, seed: int) -> str:
    """Uses the store until so many of its objects were spoilt, and closes both."""
    life = Life(seed)
    dice = random.Random(seed)
    older: dict[str, bytes] = {}
    done: Counter[str] = Counter()
    turns = 0
    while done.total() < faults:
        life.turn(store)
        turns += 1
        assert turns < TURNS_A_FAULT * faults
        names = sorted(one.name for some in vandal.listed("kv1/", within_s=30) for one in some)
        if turns % 4 or not names:
            continue
        name, other = dice.choice(names), dice.choice(names)
        value = _whole(vandal, name)
        kind = dice.choice(("flip", "cut", "longer", "zeros", "swap", "older", "gone"))
        if kind == "gone":
            vandal.remove([name], within_s=30)
        elif kind == "swap":
            vandal.replace(name, _whole(vandal, other), within_s=30)
            vandal.replace(other, value, within_s=30)
        else:
            spoilt = older.get(name, value) if kind == "older" else damaged(dice, kind, value)
            vandal.replace(name, spoilt or b"\0", within_s=30)
        older.setdefault(name, value)
        done[kind] += 1
    vandal.close()
    store.close()
    return counted({**done, **life.seen})


def _whole(objects: Driver, name: str) -> bytes:
    (start,) = objects.starts([name], 1 << 30, within_s=30)
    assert isinstance(start, Start), start
    return bytes(start.beginning)


def run_values(faults: int, seed: int) -> str:
    """A Valkey whose values somebody changes: flipped, cut, longer, swapped, older, removed, of another type."""
    with ValkeyServer() as server:
        life = Life(seed)
        dice = random.Random(seed)
        patient = dict.fromkeys(DEADLINES, 10.0)
        store = ValkeyStore(Settings((("127.0.0.1", server.port),), **patient))
        vandal = GlideClient.create(
            GlideClientConfiguration([NodeAddress("127.0.0.1", server.port)], request_timeout=VANDAL_MS)
        )
        older: dict[bytes, bytes] = {}
        done: Counter[str] = Counter()
        turns = 0
        while done.total() < faults:
            life.turn(store)
            turns += 1
            assert turns < TURNS_A_FAULT * faults
            key = vandal.random_key()
            if turns % 2 or key is None or vandal.type(key) != b"string":
                continue
            value = vandal.get(key) or b""
            kind = dice.choice(("flip", "cut", "longer", "zeros", "swap", "older", "gone", "list"))
            if kind == "older":
                vandal.set(key, older.get(key, value))
            else:
                _spoil(vandal, dice, kind, key, value)
            older.setdefault(key, value)
            done[kind] += 1
        vandal.close()
        store.close()
        return counted({**done, **life.seen})


def _spoil(vandal: GlideClient, dice: random.Random, kind: str, key: bytes, value: bytes) -> None:
    match kind:
        case "gone":
            vandal.delete([key])
        case "list":
            vandal.delete([key])
            vandal.lpush(key, [value])
        case "swap":
            other = vandal.random_key() or key
            if vandal.type(other) == b"string":
                theirs = vandal.get(other) or b""
                vandal.set(other, value)
                vandal.set(key, theirs)
        case _:
            vandal.set(key, damaged(dice, kind, value))


def run_files(faults: int, seed: int) -> str:
    """A directory whose files somebody changes."""
    with tempfile.TemporaryDirectory(prefix="kv-remote-") as folder:
        life = Life(seed)
        dice = random.Random(seed)
        root = Path(folder)
        store = DirectoryStore(folder, probe_s=10)
        done: Counter[str] = Counter()
        turns = 0
        while done.total() < faults:
            life.turn(store)
            turns += 1
            assert turns < TURNS_A_FAULT * faults
            files = sorted(path for path in root.rglob("*") if path.is_file() and path.parent.name != UNFINISHED)
            if turns % 2 or not files:
                continue
            path, other = dice.choice(files), dice.choice(files)
            kind = dice.choice(("flip", "cut", "longer", "zeros", "swap", "gone"))
            value = path.read_bytes()
            if kind == "gone":
                path.unlink()
            elif kind == "swap":
                path.write_bytes(other.read_bytes())
                other.write_bytes(value)
            else:
                path.write_bytes(damaged(dice, kind, value))
            done[kind] += 1
        return counted({**done, **life.seen})


def damaged(dice: random.Random, kind: str, value: bytes) -> bytes:
    changed = bytearray(value or b"\0")
    place = dice.randrange(len(changed))
    match kind:
        case "flip":
            changed[place] ^= 1 << dice.randrange(8)
        case "cut":
            del changed[place:]
        case "longer":
            changed[place:place] = dice.randbytes(dice.randrange(1, 9))
        case "zeros":
            changed[place : place + 64] = bytes(len(changed[place : place + 64]))
    return bytes(changed)

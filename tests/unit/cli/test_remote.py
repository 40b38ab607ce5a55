"""`kvserver remote` on a directory, and without a server. tests/process/remote has real servers and a real Valkey."""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvserver.cli import main, remote, remote_look
from kvserver.config.config import load
from kvserver.errors import ConfigError
from kvserver.movers.remote_checks import digest_of
from kvserver.remote import namespace_note
from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, encode
from kvserver.remote.directory import DirectoryStore
from kvserver.remote.namespace_note import NamespaceNote
from kvserver.remote.store import StoreError
from kvserver.tiers.records import GroupDocument, NamespaceDocument, encode_document
from kvserver.wire.status import MoverStatus, RemoteStatus
from tests.rigs.remote_chunks import EPOCH, NAMESPACE, head_of, name_of, payloads_of
from tests.rigs.status_document import a_status

OTHER = NAMESPACE._replace(namespace=bytes(range(1, 33)))
STALE_EPOCH = 7
DOCUMENT = encode_document(
    NamespaceDocument(
        format=1,
        digest=NAMESPACE.namespace,
        chunk_tokens=1536,
        groups=[
            GroupDocument(block_tokens=16, kind="full", window_tokens=0, shards=2, writers=1, pages=[None, None]),
            GroupDocument(block_tokens=32, kind="window", window_tokens=4096, shards=1, writers=1, pages=[None]),
        ],
    )
)


def ran(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main.app, ["remote", *arguments], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


def summed(name: ChunkName, sizes: tuple[int, ...]) -> Head:
    """A head with the digests of its payloads."""
    head = head_of(name, sizes=sizes)
    pairs = zip(head.shards, payloads_of(head), strict=True)
    digests = [digest_of(name, shard, payload) for shard, payload in pairs]
    shards = tuple(shard._replace(digest=digest or 0) for shard, digest in zip(head.shards, digests, strict=True))
    return head._replace(shards=shards)


class Scene:
    """A directory with three chunks that count, two that do not, and a second namespace."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = DirectoryStore(str(root))
        self.flags = ("--remotes", f"fleet=file://{root}")
        self.heads = {name: summed(name, (1, 4099)) for name in map(name_of, (1, 2, 3))}
        self.stale = {name: summed(name, (5, 70_001)) for name in (name_of(seed, epoch=STALE_EPOCH) for seed in (1, 9))}
        for name, head in (*self.heads.items(), *self.stale.items()):
            assert self.store.write(name, head, payloads_of(head))
        self.store.replace_note(NAMESPACE, namespace_note.encode(NamespaceNote(EPOCH, DOCUMENT), NAMESPACE))
        self.store.replace_note(OTHER, namespace_note.encode(NamespaceNote(5, b""), OTHER))

    def epoch(self, name: NamespaceName = NAMESPACE) -> int:
        note = namespace_note.decode(self.store.notes([name])[0], name)
        assert note is not None
        return note.epoch

    def file_of(self, seed: int) -> Path:
        key = name_of(seed).key
        (found,) = (path for path in self.root.rglob("*") if path.is_file() and key in path.read_bytes()[:112])
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def bytes_of(heads: dict[ChunkName, Head]) -> int:
    return sum(len(encode(head)) + head.payload_bytes for head in heads.values())


# ---------------------------------------------------------------- inspect


def test_inspect_lists_the_namespaces_with_a_note_and_changes_nothing(scene: Scene) -> None:
    before = {path: path.stat().st_mtime_ns for path in scene.root.rglob("*")}
    lines = ran("inspect", *scene.flags).splitlines()
    assert lines == [
        f"fleet at file://{scene.root}, tenant -",
        f"namespace {NAMESPACE.namespace.hex()}: epoch {EPOCH:016x}, chunks of 1,536 tokens, 2 groups",
        f"namespace {OTHER.namespace.hex()}: epoch {5:016x}, nothing is known of its chunks",
        "2 namespaces",
    ]
    assert {path: path.stat().st_mtime_ns for path in scene.root.rglob("*")} == before


@pytest.mark.parametrize("digits", [3, 64])
def test_inspect_counts_what_a_namespace_has_of_its_epoch_and_of_others(scene: Scene, digits: int) -> None:
    said = ran("inspect", *scene.flags, "--namespace", NAMESPACE.namespace.hex()[:digits])
    assert f"  of this epoch: 3 chunks, 3 values, {bytes_of(scene.heads):,} bytes\n" in said
    assert f"  of 1 other epochs, which no server finds: 2 chunks, 2 values, {bytes_of(scene.stale):,} bytes\n" in said
    assert "  group 0: full, blocks of 16 tokens, 2 shards\n" in said
    assert "  group 1: window of 4,096 tokens, blocks of 32 tokens, 1 shards\n" in said


def test_inspect_is_ended_at_its_bounds_and_says_so(scene: Scene) -> None:
    namespace = ("--namespace", NAMESPACE.namespace.hex())
    said = ran("inspect", *scene.flags, *namespace, "--limit", "2")
    assert said.count("ended after 2 names (--limit); at least ") == 2
    looked = [line for line in said.splitlines() if " chunks, " in line and "epoch" in line.split(":")[0]]
    assert sum(int(line.split("at least ")[1].split()[0]) for line in looked) == 2
    assert ran("inspect", *scene.flags, "--limit", "1").endswith(
        "ended after 1 names (--limit); at least 1 namespaces\n"
    )
    assert "--limit" not in ran("inspect", *scene.flags, *namespace, "--limit", "5")


def test_inspect_stops_listing_when_its_time_is_over(scene: Scene) -> None:
    lines: list[str] = []
    (named,) = load(None, {"remotes": scene.flags[1]})[0].remote_stores
    with remote_look.opened(named) as store:
        look = remote_look.Look(store, named, remote_look.Bounds(1000, -1.0), lines.append)
        look.namespace(NAMESPACE.namespace.hex())
    assert "ended after -1 s (--within); at least " in lines[-1]


def test_inspect_names_the_namespaces_that_a_beginning_may_mean(scene: Scene) -> None:
    third = NAMESPACE._replace(namespace=b"\x00\xff" + bytes(30))
    scene.store.replace_note(third, b"damaged")
    with pytest.raises(ConfigError, match=f"2 begin so: {NAMESPACE.namespace.hex()}, {third.namespace.hex()}"):
        ran("inspect", *scene.flags, "--namespace", "00")
    with pytest.raises(ConfigError, match="none begins so"):
        ran("inspect", *scene.flags, "--namespace", "ff")
    with pytest.raises(ConfigError, match="1 to 64 lower-case hexadecimal digits"):
        ran("inspect", *scene.flags, "--namespace", "../..")
    assert "its note is damaged: no server finds its chunks" in ran("inspect", *scene.flags, "--namespace", "00ff")


def test_a_chunk_is_shown_with_its_parts_and_whether_their_digests_are_right(scene: Scene) -> None:
    where = (*scene.flags, "--namespace", NAMESPACE.namespace.hex(), "--key")
    said = ran("inspect", *where, name_of(2).key.hex())
    assert f"chunk {name_of(2).key.hex()}: 2 parts, 4,100 bytes, epoch {EPOCH:016x}\n" in said
    assert "ago by its writer's clock, as write 0000000000000001\n" in said
    assert "  the first of its chain\n" in said
    assert "  group 0, shard 0: 1 bytes, right\n  group 1, shard 0: 4,099 bytes, right\n" in said

    damaged = scene.file_of(2)
    content = bytearray(damaged.read_bytes())
    content[-7] ^= 1
    damaged.write_bytes(content)
    said = ran("inspect", *where, name_of(2).key.hex(), status=1)
    assert "  group 0, shard 0: 1 bytes, right\n" in said
    assert "  group 1, shard 0: 4,099 bytes, other bytes than their digest says\n" in said

    damaged.write_bytes(content[:100])
    assert "what has its name" in ran("inspect", *where, name_of(2).key.hex(), status=1)
    assert f"not there, in epoch {EPOCH:016x}" in ran("inspect", *where, name_of(9).key.hex(), status=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect",), "no store is named: expected --remotes"),
        (("probe",), "no store is named: expected --remotes"),
        (("inspect", "--remotes", "fleet=ftp://x"), "scheme 'ftp' is unknown"),
        (("inspect", "--remotes", "a=file:///x", "--key", "00"), "name the namespace as well"),
        (("clear",), "name a namespace, or --all"),
        (("clear", "00" * 32, "--all"), "name a namespace, or --all"),
        (("clear", "--all", "--yes"), "expected --config or --remotes"),
        (("clear", "00"), "must be 64 lower-case hexadecimal digits"),
        (("clear", "00" * 32), "no terminal, so nobody can be asked: expected --yes"),
    ],
)
def test_what_is_missing_or_wrong_is_said(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ran(*arguments)


def test_a_directory_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is the file system mounted"):
        ran("inspect", "--remotes", f"fleet=file://{tmp_path}/absent")
    with pytest.raises(StoreError, match="is the file system mounted"):
        ran("clear", "00" * 32, "--yes", "--remotes", f"fleet=file://{tmp_path}")
    assert ran("probe", "--remotes", f"fleet=file://{tmp_path}/absent", status=1).startswith("fail  fleet at file://")


# ---------------------------------------------------------------- probe


def test_probe_makes_a_round_trip_and_leaves_nothing(tmp_path: Path) -> None:
    config = tmp_path / "kvserver.toml"
    store = tmp_path / "store"
    store.mkdir()
    config.write_text(f'[remotes.fleet]\nurl = "file://{store}"\n')
    said = ran("probe", "--config", str(config))
    assert said.startswith(f"warn  fleet at file://{store}: directory ")
    assert "a probe takes" in said
    assert "nothing removes old chunks" in said
    assert [path for path in store.rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------- contract


def test_contract_tests_a_plug_in_and_names_what_it_does_not_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "examples" / "stores")
    flags = ("--remotes", f"mine=plugin://sqlite_store:SqliteStore?path={tmp_path}/objects.db")
    lines = ran("contract", *flags).splitlines()
    assert len(lines) >= 16
    assert {line[:4] for line in lines} == {"ok  "}
    said = ran("contract", "--remotes", "mine=plugin://tests.rigs.bad_plugins:OtherBytes", status=1)
    assert "FAIL  pieces are read from their offsets: read from 168: expected the bytes at their offset\n" in said
    assert "ok    a second creation is told so and changes nothing\n" in said
    with pytest.raises(ConfigError, match="is no object store and no plug-in"):
        ran("contract", "--remotes", f"mine=file://{tmp_path}")


# ---------------------------------------------------------------- clear


def test_clear_gives_one_namespace_a_fresh_epoch_and_keeps_its_document(scene: Scene) -> None:
    said = ran("clear", NAMESPACE.namespace.hex(), "--yes", *scene.flags)
    assert said == "cleared: 1 namespaces; within 5 s no server finds what the store had of them\n"
    assert scene.epoch() not in (EPOCH, STALE_EPOCH)
    assert scene.epoch(OTHER) == 5
    counted = ran("inspect", *scene.flags, "--namespace", NAMESPACE.namespace.hex())
    assert "chunks of 1,536 tokens" in counted
    assert "of this epoch: 0 chunks, 0 values, 0 bytes\n" in counted
    assert "of 2 other epochs, which no server finds: 5 chunks" in counted


def test_clear_all_reaches_each_namespace_also_one_with_a_damaged_note(scene: Scene) -> None:
    third = NAMESPACE._replace(namespace=bytes(32))
    foreign = NAMESPACE._replace(tenant="team-7")
    scene.store.replace_note(third, b"damaged")
    scene.store.replace_note(foreign, namespace_note.encode(NamespaceNote(5, b""), foreign))
    assert ran("clear", "--all", "--yes", *scene.flags).startswith("cleared: 3 namespaces;")
    epochs = {scene.epoch(), scene.epoch(OTHER), scene.epoch(third)}
    assert len(epochs) == 3
    assert not epochs & {EPOCH, 5}
    assert scene.epoch(foreign) == 5, "of another tenant"


def test_a_namespace_without_a_note_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"has no note of 0000.* for tenant '-'"):
        ran("clear", "00" * 32, "--yes", *scene.flags)


def test_clear_asks_on_a_terminal_and_takes_no_for_an_answer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    asked: list[str] = []

    def answer(question: str, *, abort: bool) -> None:
        asked.append(question)
        assert abort

    monkeypatch.setattr(remote, "sys", type("Sys", (), {"stdin": Terminal}))
    monkeypatch.setattr(remote.typer, "confirm", answer)
    ran("clear", NAMESPACE.namespace.hex(), *scene.flags)
    assert asked == ["Forget this namespace in fleet?"]


# ---------------------------------------------------------------- sweep


def test_sweep_removes_what_was_cleared_and_nothing_that_a_server_may_find(scene: Scene) -> None:
    noteless = NAMESPACE._replace(namespace=bytes(32))
    alone = summed(name_of(4, of=noteless), (3,))
    scene.store.write(name_of(4, of=noteless), alone, payloads_of(alone))
    said = f"of 1 epochs: 2 chunks, 2 values, {bytes_of(scene.stale):,} bytes\n"
    assert ran("sweep", "--dry-run", *scene.flags) == f"found {said}"
    with pytest.raises(ConfigError, match="expected --yes"):
        ran("sweep", *scene.flags)
    assert ran("sweep", "--yes", *scene.flags) == f"removed {said}"
    assert ran("sweep", "--yes", *scene.flags) == "removed of 0 epochs: 0 chunks, 0 values, 0 bytes\n"
    there = {value for name in (NAMESPACE, noteless) for some in scene.store.values(name) for value in some}
    assert {value.key for value in there} == {name.key for name in scene.heads} | {name_of(4).key}
    assert scene.epoch() == EPOCH


def test_sweep_removes_what_was_not_used_for_so_many_days_if_it_is_asked_to(scene: Scene) -> None:
    old, used = scene.file_of(2), scene.file_of(3)
    for file, days in ((old, 8), (used, 6)):
        os.utime(file, (time.time() - days * 86_400,) * 2)
    said = ran("sweep", "--yes", "--older-than", "7", *scene.flags)
    assert said.startswith("removed of 2 epochs: 3 chunks, 3 values, ")
    assert not old.exists()
    assert {value.key for some in scene.store.values(NAMESPACE) for value in some} == {
        name_of(1).key,
        name_of(3).key,
    }
    with pytest.raises(ConfigError, match="older-than=-1 must be days from 0 to 36500"):
        ran("sweep", "--yes", "--older-than", "-1", *scene.flags)


def test_a_store_that_does_not_tell_what_is_old_is_swept_of_nothing_that_counts(scene: Scene) -> None:
    (named,) = load(None, {"remotes": scene.flags[1]})[0].remote_stores
    values = scene.store.values
    scene.store.values = lambda of: ([one._replace(used_s=None) for one in some] for some in values(of))  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="does not tell when a chunk was used"):
        remote_look.sweep(
            scene.store,
            named,
            [NAMESPACE.namespace],
            bounds=remote_look.Bounds(1000, 60.0),
            values_per_s=1e9,
            only_looks=False,
            unused_since_s=time.time() - 1,
        )
    assert all(scene.store.look(name) is not None for name in scene.heads)


def test_sweep_ends_at_its_bounds_and_takes_its_time(scene: Scene) -> None:
    assert ran("sweep", "--yes", "--limit", "1", *scene.flags).startswith(
        "ended after 1 names (--limit); removed of 1 epochs: 1 chunks, "
    )
    (named,) = load(None, {"remotes": scene.flags[1]})[0].remote_stores
    slept: list[float] = []
    bounds = remote_look.Bounds(1000, -1.0)
    options = {"bounds": bounds, "values_per_s": 4.0, "only_looks": False, "sleep": slept.append}
    swept = remote_look.sweep(scene.store, named, [NAMESPACE.namespace], **options)
    assert swept.ended == "after -1 s (--within)"
    rest = [remote_look.sweep(scene.store, named, [NAMESPACE.namespace], **options) for _ in range(9)]
    assert sum(one.content.values for one in (swept, *rest)) <= 1
    assert sum(slept) <= 0.25


def test_sweep_leaves_what_is_written_after_a_clear_that_comes_while_it_lists(scene: Scene) -> None:
    """The note is read behind the list: what the list has of a later epoch belongs to the note that is read."""
    (named,) = load(None, {"remotes": scene.flags[1]})[0].remote_stores
    values = scene.store.values
    new = name_of(5, epoch=99)

    def cleared_meanwhile(of: object) -> object:
        for some in values(of):  # type: ignore[arg-type]
            if scene.epoch() != 99:
                scene.store.replace_note(NAMESPACE, namespace_note.encode(NamespaceNote(99, DOCUMENT), NAMESPACE))
                head = summed(new, (7,))
                scene.store.write(new, head, payloads_of(head))
            yield some

    scene.store.values = cleared_meanwhile  # type: ignore[method-assign, assignment]
    bounds = remote_look.Bounds(1000, 60.0)
    remote_look.sweep(scene.store, named, [NAMESPACE.namespace], bounds=bounds, values_per_s=1e9, only_looks=False)
    assert scene.store.look(new) is not None
    assert all(scene.store.look(name) is None for name in scene.heads), "they were cleared"


# ---------------------------------------------------------------- status

FLEET = RemoteStatus(
    name="fleet",
    url="valkey://10.0.0.7",
    usable=True,
    nodes_left_alone=["10.0.0.8:6379"],
    namespaces=5,
    namespaces_known=3,
    namespaces_heard=3,
    looked_for=2,
    queued_chunks=1007,
    reading_bytes=3 << 20,
    writing_bytes=5 << 20,
    read_bytes_per_s=1.5e9,
    clears_owed=4,
)
MOVER = MoverStatus(
    mover=2,
    device="remote",
    state="ready",
    pid=98,
    backend="valkey",
    facts={"remote": "fleet", "version": "Valkey 8.1.1", "1 warning": "maxmemory is 0"},
    caches=0,
    jobs=0,
)


def test_status_prints_what_the_server_says_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"lookups": 3, "remote_reads": 1234, "remote_read_bytes": 77, "remote_failures": {"read remote-slow": 6}}
    known = replace(a_status(), remote=FLEET, movers=[MOVER], counters=counters)
    monkeypatch.setattr(remote, "ask_status", lambda _socket: msgspec.to_builtins(known))
    lines = ran("status").splitlines()
    assert lines[:2] == ["fleet     valkey://10.0.0.7", "usable    yes"]
    assert "node      10.0.0.8:6379: left alone after failures, and tried again by itself" in lines
    assert (
        "now       2 prompts are looked for, 3MiB being read, 5MiB being written, 1,007 chunks wait to be written"
    ) in lines
    assert "notes     3 of 5 namespaces in use are known" in lines
    assert "told      3 of 5 namespaces have announcements that are read" in lines
    assert "clears    4 are not known to the store yet" in lines
    assert "reads     1.5 GB/s as measured" in lines
    assert [line for line in lines if line.startswith("fact")] == [
        "fact      version: Valkey 8.1.1",
        "fact      1 warning: maxmemory is 0",
    ]
    assert [line for line in lines if line.startswith(("counted", "failed"))] == [
        "counted   reads 1,234",
        "counted   read_bytes 77",
        "failed    read remote-slow 6",
    ]
    shown = json.loads(ran("status", "--json"))
    assert shown["remote"]["clears_owed"] == 4
    assert shown["counters"] == {name: count for name, count in counters.items() if name != "lookups"}


def test_status_prints_each_of_several_stores_with_its_own_facts_and_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    near = replace(FLEET, name="near", counted={"reads": 7, "writes": 1}, failures={"read gone": 2})
    far = replace(FLEET, name="far", usable=False, counted={"reads": 0, "writes": 5})
    movers = [replace(MOVER, device=f"remote:{name}", facts={"version": name}) for name in ("near", "far")]
    counters = {"remote_reads": 7, "remote_writes": 6, "remote_failures": {"read gone": 2}}
    known = replace(a_status(), remote=near, other_remotes=[far], movers=movers, counters=counters)
    monkeypatch.setattr(remote, "ask_status", lambda _socket: msgspec.to_builtins(known))
    first, second = (text.splitlines() for text in ran("status").split("\n\n"))
    said = ("near", "far", "usable", "fact", "counted", "failed")
    assert [line for line in first if line.startswith(said)] == [
        "near     valkey://10.0.0.7",
        "usable    yes",
        "fact      version: near",
        "counted   reads 7",
        "counted   writes 1",
        "failed    read gone 2",
    ]
    assert [line for line in second if line.startswith(said)] == [
        "far     valkey://10.0.0.7",
        "usable    no: its mover does not run",
        "fact      version: far",
        "counted   reads 0",
        "counted   writes 5",
    ]
    shown = json.loads(ran("status", "--json"))
    assert [shown["remote"]["name"], *(one["name"] for one in shown["other_remotes"])] == ["near", "far"]


# ---------------------------------------------------------------- several stores


@pytest.fixture
def two(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The scene's store, and an empty one."""
    far = f"far=file://{tmp_path_factory.mktemp('far')}"
    ran("probe", "--remotes", far)  # it has been used
    return f"{scene.flags[1]} {far}"


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ran(*arguments)
    return caught.value.message


@pytest.mark.parametrize("verb", ["inspect", "sweep", "contract"])
def test_of_several_stores_one_has_to_be_named(scene: Scene, two: str, verb: str) -> None:
    assert refusal(verb, "--remotes", two) == "several stores are named: expected --store with one of fleet, far"
    assert "expected one of fleet, far" in refusal(verb, "--remotes", two, "--store", "near")


def test_the_store_that_is_named_is_looked_at(scene: Scene, two: str) -> None:
    assert ran("inspect", "--remotes", two, "--store", "fleet") == ran("inspect", *scene.flags)
    assert "0 namespaces" in ran("inspect", "--remotes", two, "--store", "far")


def test_all_stores_are_tried_and_cleared_unless_one_is_named(scene: Scene, two: str) -> None:
    lines = ran("probe", "--remotes", two).splitlines()
    assert [line[:10] for line in lines] == ["warn  flee", "warn  far "]
    assert len(ran("probe", "--remotes", two, "--store", "far").splitlines()) == 1
    digits = NAMESPACE.namespace.hex()
    assert "far has no note" in refusal("clear", digits, "--yes", "--remotes", two, "--store", "far")
    assert scene.epoch() == EPOCH
    said = ran("clear", digits, "--yes", "--remotes", two).splitlines()
    assert [line.split(": ")[:2] for line in said] == [["in fleet", "cleared"], ["in far", "not cleared"]]
    assert scene.epoch() != EPOCH
    said = ran("clear", "--all", "--yes", "--remotes", two).splitlines()
    assert [line.split(";")[0] for line in said] == ["in fleet: cleared: 2 namespaces", "in far: cleared: 0 namespaces"]


def test_a_clear_goes_to_the_other_store_although_one_cannot_be_asked_and_ends_with_1(scene: Scene) -> None:
    lost = f"lost=file://{scene.root}/none {scene.flags[1]}"
    said = ran("clear", NAMESPACE.namespace.hex(), "--yes", "--remotes", lost, status=1).splitlines()
    assert [line.split(": ")[:2] for line in said] == [["in lost", "not cleared"], ["in fleet", "cleared"]]
    assert scene.epoch() != EPOCH


def test_status_says_why_a_store_is_not_used_and_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [
        replace(a_status(), remote=replace(FLEET, usable=False, problem="no such directory")),
        replace(a_status(), remote=replace(FLEET, usable=False)),
        a_status(),
    ]
    monkeypatch.setattr(remote, "ask_status", lambda _socket: msgspec.to_builtins(documents.pop(0)))
    assert "usable    no: no such directory\n" in ran("status")
    assert "usable    no: its mover does not run\n" in ran("status")
    assert ran("status") == "this server has no remote store; the key `remotes` names one\n"

"""Each check of doctor: its finding when the machine lacks something."""

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvserver
from kvserver.cli.doctor import doctor
from kvserver.cli.doctor.doctor import CHECKS, examine
from kvserver.config.config import Config
from kvserver.movers import remote_store
from kvserver.supervisor.machine_memory import RESERVE_BYTES, Memory
from kvserver.units import GIB, MIB, TIB
from tests.rigs.valkey_server import ValkeyServer


def test_every_check_answers_in_one_line() -> None:
    findings = examine(Config())
    assert [finding.check for finding in findings] == [name for name, _ in CHECKS]
    assert all(finding.text and "\n" not in finding.text for finding in findings)


def test_a_check_that_the_system_refuses_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Config) -> tuple[str, str]:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(doctor, "CHECKS", (("seals", refuse),))
    (finding,) = examine(Config())
    assert (finding.verdict, finding.text) == ("fail", "cannot be checked: Operation not permitted")


def test_a_native_module_of_another_release_is_told_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("kvserver._native")
    old.__file__ = "/opt/old.so"
    old.BUILD = "old"  # type: ignore[attr-defined]
    old.Board = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvserver._native", old)
    verdict, text = doctor.native_module(Config())
    assert verdict == "fail"
    assert "/opt/old.so is of another release: it lacks ArenaGrower, CopyEngine, " in text
    assert ", Ledger, " in text
    assert "Board" not in text


def test_a_missing_native_module_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvserver._native", None)
    verdict, text = doctor.native_module(Config())
    assert verdict == "fail"
    assert text.startswith("kvserver._native cannot be loaded: ")


def test_a_message_crosses_zeromq() -> None:
    verdict, text = doctor.zeromq(Config())
    assert verdict == "ok"
    assert text.startswith("libzmq ")


def test_the_socket_directory_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(socket=f"{tmp_path}/run/kv.sock")
    assert doctor.socket_directory(config) == ("ok", f"{tmp_path}/run will be made")
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(0o700)
    assert doctor.socket_directory(config)[0] == "ok"
    directory.chmod(0o770)
    verdict, text = doctor.socket_directory(config)
    assert (verdict, "others can replace the socket" in text) == ("warn", True)
    directory.chmod(0o700)
    with monkeypatch.context() as patched:
        if os.geteuid() == 0:
            os.chown(directory, 4711, -1)
        patched.setattr(os, "geteuid", lambda: 0)
        verdict, text = doctor.socket_directory(config)
        assert (verdict, "it belongs to another user" in text) == ("warn", True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert doctor.socket_directory(config) == ("fail", f"{directory} cannot be written to by this user")
    directory.rmdir()
    assert doctor.socket_directory(config)[0] == "fail"


def test_a_socket_of_a_live_server_is_told_from_one_left_behind(tmp_path: Path) -> None:
    config = Config(socket=f"{tmp_path}/kv.sock")
    assert doctor.socket_owner(config) == ("ok", f"{tmp_path}/kv.sock is free")
    with open(f"{tmp_path}/kv.sock.lock", "w+") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert doctor.socket_owner(config) == ("warn", f"a server lives at {tmp_path}/kv.sock (process 4711)")
    assert doctor.socket_owner(config)[0] == "ok"


def test_an_unknown_group_fails() -> None:
    assert doctor.socket_group(Config(socket_group="no-such-group"))[0] == "fail"
    assert doctor.socket_group(Config())[0] == "ok"


def test_a_taken_port_fails_unless_the_server_runs_already(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, open(f"{tmp_path}/kv.sock.lock", "w+") as lock:
        port = taken.getsockname()[1]
        config = Config(http_port=port, socket=f"{tmp_path}/kv.sock")
        assert doctor.http_port(config) == ("fail", f"127.0.0.1:{port}: Address already in use")
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert doctor.http_port(config)[0] == "warn"
    assert doctor.http_port(config)[0] == "ok"
    assert doctor.http_port(Config(http_port=0)) == ("ok", "off")


@pytest.mark.parametrize(
    ("total", "available", "limit", "verdict"),
    [
        (9 * GIB, 7 * GIB, None, "ok"),
        (9 * GIB, 3 * GIB, None, "fail"),
        (3 * GIB, 3 * GIB, None, "fail"),
        (9 * GIB, 7 * GIB, 3 * GIB, "fail"),
        (9 * GIB, 7 * GIB, 6 * GIB, "ok"),
        (9 * GIB, 4 * GIB + RESERVE_BYTES, 4 * GIB + RESERVE_BYTES, "ok"),
        (9 * GIB, 4 * GIB + RESERVE_BYTES - 1, None, "fail"),
    ],
)
def test_memory_is_held_against_machine_and_control_group(
    total: int, available: int, limit: int | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "read_memory", lambda: Memory(total, available, limit))
    assert doctor.memory(Config(arena_bytes=4 * GIB, socket="/nonexistent/kv.sock"))[0] == verdict


def test_this_machine_has_memory() -> None:
    assert doctor.memory(Config(arena_bytes=2 * MIB))[0] == "ok"
    assert doctor.memory(Config(arena_bytes=63 * TIB))[0] == "fail"


@pytest.mark.parametrize(
    ("said", "disks", "expected"),
    [
        ("always within_size [advise] never deny force\n", "/mnt/a", "is advise: Linux gives what it has"),
        ("always within_size advise [never] deny force\n", "/mnt/a", "is never: Linux gives none; a virtual disk may"),
        ("always within_size advise [never] deny force\n", "", "none reserved, shmem_enabled is never"),
    ],
)
def test_what_linux_does_with_the_wish_for_huge_pages_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, disks: str, expected: str
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(said)
    monkeypatch.setattr(doctor, "SHMEM_HUGE_PAGES", setting)
    verdict, text = doctor.huge_pages(Config(disk_paths=disks))
    assert verdict == "ok"
    assert expected in text
    assert ("disk" in text) == ("disk" in expected)


def test_huge_pages_that_are_not_there_fail() -> None:
    assert doctor.huge_pages(Config())[0] == "ok"
    verdict, text = doctor.huge_pages(Config(huge_page_bytes=GIB, arena_bytes=60 * TIB))
    assert verdict == "fail"
    assert "61440 needed" in text or "no huge pages of 1GiB" in text


def test_a_numa_node_that_is_not_there_fails() -> None:
    assert doctor.memory_nodes(Config(numa_node=1023)) == ("fail", "this machine has no NUMA node 1023")


def test_too_few_descriptors_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 300))
    assert doctor.open_files(Config(sessions_max=75))[0] == "ok"
    assert doctor.open_files(Config(sessions_max=76))[0] == "warn"


def test_seals_that_do_not_hold_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.memfd_seals(Config())[0] == "ok"
    monkeypatch.setattr(doctor.fcntl, "fcntl", lambda *arguments: 0)
    assert doctor.memfd_seals(Config()) == ("fail", "a sealed memfd could be shrunk")


def test_a_kernel_without_populate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.populate(Config())[0] == "ok"
    monkeypatch.setattr(doctor, "MADV_POPULATE_WRITE", 9999)
    verdict, text = doctor.populate(Config())
    assert verdict == "fail"
    assert "needs Linux 5.14" in text
    assert mmap.PAGESIZE > 0


def test_a_kernel_without_peer_pidfd_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SO_PEERPIDFD", 9999)
    assert doctor.pidfds(Config())[0] == "warn"


def test_assertions_must_be_on() -> None:
    verdict, text = doctor.interpreter(Config())
    assert verdict == "ok"
    assert text.startswith(f"kvserver {kvserver.__version__} on ")


@pytest.fixture
def port_before_taken() -> Iterator[int]:
    """A free port; the next one is taken."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                free.close()  # doctor binds it
                yield port
                return


def test_an_events_endpoint_that_is_taken_fails(port_before_taken: int) -> None:
    taken = port_before_taken + 1
    for asked in (taken, port_before_taken):
        verdict, text = doctor.events_endpoint(Config(events_endpoint=f"tcp://127.0.0.1:{asked}"))
        assert verdict == "fail"
        assert text.startswith(f"events_endpoint: tcp://127.0.0.1:{taken}: Address already in use")
    assert doctor.events_endpoint(Config())[0] == "ok"


def test_an_events_path_needs_its_directory(tmp_path: Path) -> None:
    there, absent = (Config(events_endpoint=f"ipc://{tmp_path}/{name}") for name in ("e", "absent/e"))
    assert doctor.events_endpoint(there)[0] == "ok"
    assert doctor.events_endpoint(absent)[0] == "fail"
    assert list(tmp_path.iterdir()) == [], "it was only looked at"


def test_a_cache_directory_that_can_never_be_one_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        verdict, text = doctor.cache_directory(Config(cache_dir=f"{tmp_path}/{name}"))
        assert (verdict, f"cache_dir='{tmp_path}/{name}': expected a directory" in text) == ("fail", True)
    assert doctor.cache_directory(Config(cache_dir=f"{tmp_path}/to/be/made"))[0] == "ok"
    tmp_path.chmod(0o777)
    verdict, text = doctor.cache_directory(Config(cache_dir=str(tmp_path)))
    assert (verdict, "mode 0777" in text) == ("warn", True)


@pytest.mark.parametrize(
    ("url", "module", "said"),
    [
        ("valkey://127.0.0.1:9", "glide_sync", "install kvserver[valkey]"),
        ("s3://bucket", "obstore", "install kvserver[object-stores]"),
        ("mooncake://127.0.0.1:9", "mooncake", "install kvserver[mooncake]"),
        ("plugin://no_such.module:Store", "", "no_such.module:Store is not installed in this environment"),
    ],
)
def test_a_remote_store_whose_library_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, said: str
) -> None:
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    verdict, text = doctor.remote_store(Config(remotes=f"fleet={url}"))
    assert verdict == "fail"
    assert "remote-library" in text
    assert text.endswith(said)


def test_a_mooncake_store_whose_system_library_is_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "LOADED_BY_MOONCAKE", {"libnosuch.so.7": "libnosuch7"})
    monkeypatch.setattr(remote_store, "find_spec", lambda _: object())
    verdict, text = doctor.remote_store(Config(remotes="fleet=mooncake://127.0.0.1:9"))
    assert verdict == "fail"
    assert text.endswith("a Mooncake Store needs libnosuch.so.7: install the package libnosuch7")


def test_no_remote_store_is_fine() -> None:
    assert doctor.remote_store(Config()) == ("ok", "none")


def test_a_chunk_goes_to_a_directory_and_back_and_nothing_of_it_stays(tmp_path: Path) -> None:
    verdict, text = doctor.remote_store(Config(remotes=f"shared=file://{tmp_path}"))
    assert verdict == "warn"
    assert text.startswith(f"shared at file://{tmp_path}: directory ")
    assert "nothing removes old chunks" in text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_each_of_several_stores_is_tried_and_the_worst_verdict_counts(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    given = f"near=file://{tmp_path}/one far=file://{tmp_path}/other"
    verdict, text = doctor.remote_store(Config(remotes=given))
    assert verdict == "warn"
    assert f"near at file://{tmp_path}/one: directory " in text
    assert f"far at file://{tmp_path}/other: directory " in text
    verdict, text = doctor.remote_store(Config(remotes=f"{given} lost=file://{tmp_path}/none"))
    assert verdict == "fail"
    assert f"far at file://{tmp_path}/other: directory " in text
    assert f"lost at file://{tmp_path}/none: remote-" in text


def test_a_chunk_goes_to_a_valkey_and_back_and_nothing_of_it_stays() -> None:
    with ValkeyServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        verdict, text = doctor.remote_store(Config(remotes=f"fleet=valkey://127.0.0.1:{server.port}"))
        assert (verdict, server.ask("DBSIZE")) == ("ok", ":0\r\n")
        assert f"fleet at valkey://127.0.0.1:{server.port}: valkey " in text


def test_a_valkey_that_never_evicts_is_a_warning_with_what_to_set() -> None:
    with ValkeyServer("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as server:
        verdict, text = doctor.remote_store(Config(remotes=f"fleet=valkey://127.0.0.1:{server.port}"))
    assert verdict == "warn"
    assert "expected allkeys-lru" in text


@pytest.mark.parametrize(
    ("permission", "code"), [("+@all -set", "remote-denied"), ("+@all -get -getrange", "remote-denied")]
)
def test_a_permission_that_is_missing_is_named(tmp_path: Path, permission: str, code: str) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "secret").chmod(0o600)
    with ValkeyServer() as server:
        assert server.ask("ACL", "SETUSER", "kv", "on", ">hunter2", "~*", *permission.split()) == "+OK\r\n"
        url = f"valkey://127.0.0.1:{server.port}?username=kv&password_file={tmp_path}/secret"
        verdict, text = doctor.remote_store(Config(remotes=f"fleet={url}"))
    assert verdict == "fail"
    assert f": {code}: " in text
    assert "hunter2" not in text


def test_a_store_that_is_away_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    with ValkeyServer() as server:
        port = server.port
    verdict, text = doctor.remote_store(Config(remotes=f"fleet=valkey://127.0.0.1:{port}"))
    assert verdict == "fail"
    assert ": remote-" in text
    verdict, text = doctor.remote_store(Config(remotes=f"shared=file://{tmp_path}/none"))
    assert (verdict, "no such directory" in text) == ("fail", True)

"""Starts that must fail: exit status 2, one line with expected and actual value, and nothing left behind."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import WAIT_S, Server, is_gone, pids_below, until

SERVE = ("-m", "kvserver", "serve")
BECOME_NOBODY = """
import os, socket, sys
import kvserver.supervisor.supervisor  # now: an interpreter in root's home is out of reach afterwards
if os.geteuid() != 0:
    sys.exit("not-root")
os.setgroups([]), os.setgid(65534), os.setuid(65534)
"""
TRY_TO_SERVE = """
try:
    config = kvserver.config.config.Config(socket=sys.argv[1], arena_bytes=1 << 20, http_port=0)
    kvserver.supervisor.supervisor.run(config)
except kvserver.errors.ConfigError as error:
    sys.stderr.write(f"kvserver: {error}"), sys.exit(2)
"""
SERVE_AS_NOBODY = ("-c", BECOME_NOBODY + TRY_TO_SERVE)
CONNECT_AS_NOBODY = ("-c", BECOME_NOBODY + "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])")
STORY = prompt(981, chunks=2)
SMALL = ("--arena-bytes=1MiB", "--http-port=0")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket; pytest's own paths may be too long."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


def refused(*flags: str, program: Sequence[str] = SERVE, status: int = 2, traceback: bool = False) -> str:
    """Starts a server that must refuse; returns its message. None of its processes is left."""
    run = subprocess.Popen(
        [sys.executable, *program, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = run.communicate(timeout=WAIT_S)
    finally:
        run.kill()
    if "not-root" in said:
        pytest.skip("only root can be somebody else, and others cannot be kept out of what is theirs")
    assert run.returncode == status, said
    assert ("Traceback" in said) == traceback, said
    assert not _processes_of_session(run.pid), "a process of the server lives on"
    return said


def _processes_of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def complaint(said: str) -> str:
    """The one error line of the command."""
    lines = [line for line in said.splitlines() if line.startswith("kvserver: ")]
    assert len(lines) == 1, said
    return lines[0].removeprefix("kvserver: ")


def starts_at(path: Path) -> None:
    """Checks that the path is reusable: a server starts there and stores."""
    server = Server()
    server.path = path
    with server, Engine(path) as engine:
        assert engine.ready().store(STORY).chunks == 2
        assert server.stop() == 0


# ---------------------------------------------------------------- configuration


def test_an_impossible_size_is_one_line() -> None:
    """The same code refuses every other impossible value; see tests/unit/config/test_config.py."""
    said = complaint(refused("--arena-bytes=3MiB", "--slab-bytes=4MiB"))
    assert said.startswith("config-arena: arena_bytes=3MiB must hold a slab of slab_bytes=4MiB at least")


def test_an_unknown_key_is_named_with_its_line(folder: Path) -> None:
    file = folder / "kv.toml"
    file.write_text('arena_bytes = "1MiB"\nlease_tll_ms = 5\n')
    assert complaint(refused(f"--config={file}")) == (
        f"config-key: {file}:2: unknown key 'lease_tll_ms'; did you mean lease_ttl_ms?"
    )


def test_a_path_that_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    path = f"{folder}/".ljust(102, "x")
    assert complaint(refused(f"--socket={path}", *SMALL)).startswith(
        f"config-socket: socket='{path}' has 102 bytes; as a socket's path it may have 101"
    )
    assert os.listdir(folder) == []


def test_the_longest_path_of_a_socket_is_one(folder: Path) -> None:
    """The longest valid path: all files beside the socket fit as well, and a client connects."""
    starts_at(Path(f"{folder}/".ljust(101, "x")))


# ---------------------------------------------------------------- sockets


def test_the_socket_of_a_live_server_is_left_to_it(server: Server) -> None:
    with Engine(server.path) as engine:
        engine.ready().store(STORY)
        said = complaint(refused(f"--socket={server.path}", *SMALL))
        assert said == (f"socket-in-use: {server.path} belongs to a server that lives (process {server.pid})")
        assert engine.retrieve(STORY) == 2
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


def test_the_socket_of_a_dead_server_is_taken_over(server: Server) -> None:
    server.kill()
    assert server.path.is_socket()
    assert Path(f"{server.path}.local").is_socket()
    server.start()
    with Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == 2
        assert engine.retrieve(STORY) == 2


@pytest.mark.parametrize(("kind", "suffix"), [("file", ""), ("directory", ".local"), ("symlink", "")])
def test_what_is_no_socket_is_left_alone(folder: Path, suffix: str, kind: str) -> None:
    """A mistyped path must not delete somebody's file."""
    path = folder / "precious"
    there = Path(f"{path}{suffix}")
    match kind:
        case "file":
            there.write_text("years of work")
        case "directory":
            there.mkdir()
        case _:
            there.symlink_to("elsewhere")
    said = refused(f"--socket={path}", *SMALL)
    assert re.search(rf"brain cannot start why=\"socket: {there} exists and is no socket; remove it, or choose", said)
    assert os.path.lexists(there)
    assert kind != "file" or there.read_text() == "years of work"
    assert sorted(os.listdir(folder)) == sorted([there.name, f"{path.name}.lock"])


def test_a_folder_that_one_may_not_write_to_is_named(folder: Path) -> None:
    folder.chmod(0o755)
    said = refused(f"{folder}/kv.sock", program=SERVE_AS_NOBODY)
    assert complaint(said) == f"socket: {folder}/kv.sock: Permission denied"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    said = complaint(refused(f"--socket={folder}/kv.sock", "--http-port=0"))
    told = f"{folder} belongs to user {os.geteuid()} and has mode {mode:04o}; expected"
    assert said.startswith(f"socket-directory: {told}")
    assert list(folder.iterdir()) == []


def test_the_socket_of_another_user_can_be_neither_used_nor_taken(folder: Path) -> None:
    """Refused even when the other user's server is dead and anyone may write to the folder."""
    path = folder / "kv.sock"
    server = Server()
    server.path = path
    with server:
        folder.chmod(0o1777)
        assert "PermissionError" in refused(f"{path}.local", program=CONNECT_AS_NOBODY, traceback=True, status=1)
        server.kill()
        assert complaint(refused(f"{path}", program=SERVE_AS_NOBODY)) == f"socket: {path}: Permission denied"
        assert path.is_socket()
        server.start()


def test_a_lock_that_leads_elsewhere_is_not_followed(folder: Path) -> None:
    """In a sticky directory anybody may have made the link, and opening it would empty one of our user's files."""
    folder.chmod(0o1777)
    precious = folder / "precious"
    precious.write_text("years of work")
    (folder / "kv.sock.lock").symlink_to(precious)
    said = complaint(refused(f"--socket={folder}/kv.sock", *SMALL))
    assert said == f"socket: {folder}/kv.sock: Too many levels of symbolic links"
    assert precious.read_text() == "years of work"


def test_a_cache_directory_that_is_a_file_is_refused(folder: Path) -> None:
    (folder / "file").touch()
    said = complaint(refused(f"--socket={folder}/kv.sock", *SMALL, f"--cache-dir={folder}/file"))
    assert said.startswith(f"cache-dir: cache_dir='{folder}/file': expected a directory")


# ---------------------------------------------------------------- the machine


def test_an_arena_larger_than_the_machine_is_refused(folder: Path) -> None:
    path = folder / "kv.sock"
    said = complaint(refused(f"--socket={path}", "--arena-bytes=32TiB", "--http-port=0"))
    assert re.match(rf"arena-memory: arena_bytes={32 << 40} and \d+ beside it exceed the \d+ bytes of memory", said)
    assert os.listdir(folder) == ["kv.sock.lock"]
    starts_at(path)
    assert os.listdir(folder) == ["kv.sock.lock"]


def test_huge_pages_that_nobody_reserved_are_refused(folder: Path) -> None:
    said = complaint(
        refused(f"--socket={folder}/kv.sock", "--arena-bytes=8TiB", "--huge-page-bytes=2MiB", "--http-port=0")
    )
    assert re.match(rf"arena-memory: arena_bytes={8 << 40} needs as much in free huge pages of 2097152 bytes", said)


def test_a_numa_node_that_is_none_is_refused(folder: Path) -> None:
    said = complaint(refused(f"--socket={folder}/kv.sock", *SMALL, "--numa-node=900"))
    assert said.startswith("arena-memory: numa_node=900: placing the arena on NUMA node 900")


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(f"--socket={folder}/kv.sock", "--arena-bytes=1MiB", f"--http-port={port}")
    assert re.search(rf"brain cannot start why=\"http-port: .*http_port={port}: Address already in use", said)
    assert re.search(rf"^kvserver: http-port: .*http_port={port}: Address already in use$", said, re.MULTILINE)
    assert os.listdir(folder) == ["kv.sock.lock"]


def test_a_server_that_is_interrupted_while_it_starts_leaves_nothing(folder: Path) -> None:
    server = Server(http_port=0)
    process = server.spawn()
    below = until("a brain", lambda: pids_below(process.pid))
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    until("its children to end", lambda: all(is_gone(pid) for pid in below))
    server.close()

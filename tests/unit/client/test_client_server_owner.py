"""Which user's server a client may hand its pool to; no other server gets it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient import Client, RequestError, Timeouts
from kvclient.transport.server_owner import trusted_users
from tests.rigs.client_rig import QUICK
from tests.rigs.fake_server import WAIT_S, FakeServer

ME, SERVER, UNKNOWN = 1000, 997, 65_534
IMPOSTOR = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sockets = []
for path, kind in ((sys.argv[1], socket.SOCK_STREAM), (sys.argv[1] + ".local", socket.SOCK_SEQPACKET)):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(path)
    os.chmod(path, 0o777)
    listener.listen()
    sockets.append(listener)
print("listens", flush=True)
end, _ = sockets[1].accept()
frame, descriptors, _, _ = socket.recv_fds(end, 1 << 16, 4)
print(len(frame), len(descriptors), flush=True)
"""


def directory(owner: int, mode: int) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 2, 3, 1, owner, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("where", "above", "trusted"),
    [
        (directory(ME, 0o700), directory(0, 0o755), {0, ME}),
        (directory(SERVER, 0o750), directory(0, 0o755), {0, ME, SERVER}),
        (directory(SERVER, 0o700), directory(0, 0o777), {0, ME, SERVER}),
        (directory(0, 0o1777), directory(0, 0o755), {0, ME}),
        (directory(SERVER, 0o700), directory(0, 0o1777), {0, ME}),
        (directory(UNKNOWN, 0o700), directory(0, 0o755), {0, ME, UNKNOWN}),
        (directory(UNKNOWN, 0o777), directory(0, 0o755), {0, ME}),
    ],
    ids=[
        "own",
        "the server's, as under systemd",
        "the server's, in a volume of a pod",
        "/tmp itself",
        "anybody's, made in /tmp",
        "unmapped, and closed to others",
        "unmapped, and open to others",
    ],
)
def test_the_owner_of_the_directory_counts_where_he_decides(
    where: os.stat_result, above: os.stat_result, trusted: set[int]
) -> None:
    assert trusted_users(where, above, me=ME) == trusted


def test_a_server_of_this_user_is_served_in_a_sticky_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with FakeServer(tmp_path / "s") as fake, Client(fake.path, timeouts=Timeouts(**QUICK)) as client:
        assert client.wait_connected(WAIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_program_at_the_address_is_told_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    tmp_path.chmod(0o1777)
    path = tmp_path / "s"
    impostor = subprocess.Popen([sys.executable, "-c", IMPOSTOR, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listens\n"
        with Client(path, timeouts=Timeouts(**QUICK)) as client:
            with pytest.raises(RequestError, match=r"server-owner: user 65534.* listens at .*; expected user 0\."):
                client.wait_connected(WAIT_S)
            assert client.problem is not None
            assert not client.connected
        assert impostor.communicate(timeout=WAIT_S)[0] == "0 0\n", "the connection ended, and nothing had come by it"
    finally:
        impostor.kill()
        impostor.communicate()

"""Notifications to systemd and its environment variables, without systemd."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvserver.supervisor.systemd import Manager


def listener(path: str) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    end.bind(path)
    return end


def heard(end: socket.socket) -> list[str]:
    said = []
    while True:
        try:
            said.append(end.recv(4096).decode())
        except BlockingIOError:
            return said


def test_ready_is_said_once_and_signs_of_life_only_where_somebody_watches(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with listener(path) as end:
        for watched, expected in ((False, ["READY=1"]), (True, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"])):
            environment = {"NOTIFY_SOCKET": path, "OTHER": "stays"} | ({"WATCHDOG_USEC": "1"} if watched else {})
            manager = Manager(environment)
            manager.alive()
            manager.alive()
            assert heard(end) == expected
            assert environment == {"OTHER": "stays"}, "a child would believe that it is meant"


def test_ready_is_said_again_when_nobody_could_hear_it(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    manager = Manager({"NOTIFY_SOCKET": path})
    manager.alive()
    with listener(path) as end:
        manager.alive()
        manager.alive()
        assert heard(end) == ["READY=1"]


def test_a_socket_in_the_abstract_namespace_is_one_too() -> None:
    name = f"kvserver-test-{os.getpid()}"
    with listener(f"\0{name}") as end:
        Manager({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert heard(end) == ["STOPPING=1"]


def test_without_systemd_nothing_happens() -> None:
    manager = Manager({})
    manager.alive()
    manager.keep("x", 0)
    assert manager.take() == {}
    assert manager.left_behind() == []


def test_descriptors_that_were_passed_to_another_process_are_not_ours() -> None:
    environment = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    assert Manager(environment).take() == {}
    assert environment == {}


def test_what_concerns_the_store_waits_for_room_in_the_queue(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    manager = Manager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1"})
    with listener(path) as end, ThreadPoolExecutor(1) as beside:
        manager.alive()
        for _ in range(10_000):
            manager.alive()  # until the queue is full
        telling = beside.submit(manager.forget, "a")
        said = []
        while not telling.done() or not said or said[-1] != "FDSTOREREMOVE=1\nFDNAME=a":
            said += heard(end)
            assert not telling.done() or telling.result()
        assert len(said) < 10_000


def test_what_could_not_be_said_of_the_store_is_known(tmp_path: Path) -> None:
    manager = Manager({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    assert (manager.keep("a", 0), manager.forget("a")) == (False, False)


@pytest.mark.parametrize(
    ("mounted", "lines"),
    [
        ("", "0::/system.slice/kvserver.service\n"),
        ("unified", "3:memory:/x\n0::/system.slice/kvserver.service\n"),
        ("systemd", "3:memory:/x\n1:name=systemd:/system.slice/kvserver.service\n"),
    ],
)
def test_processes_of_an_earlier_start_are_found_in_the_units_control_group(
    tmp_path: Path, mounted: str, lines: str
) -> None:
    group = tmp_path / "sys/fs/cgroup" / mounted / "system.slice/kvserver.service"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    (group / "cgroup.procs").write_text(f"77\n{os.getpid()}\n4711\n")
    assert Manager({"INVOCATION_ID": "f00"}).left_behind(tmp_path) == [77, 4711]
    assert Manager({}).left_behind(tmp_path) == [], "another's control group says nothing"
    (group / "cgroup.procs").unlink()
    assert Manager({"INVOCATION_ID": "f00"}).left_behind(tmp_path) is None, "nobody knows"

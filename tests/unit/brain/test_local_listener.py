"""The local door by itself: connections without a session."""

import asyncio
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvserver.brain.fair_turns import Line
from kvserver.brain.local_listener import LocalDoor
from kvserver.config.descriptor_limit import Share

STRANGERS = 3


class Scene:
    """A door, and clients whose connections are numbered from 1."""

    def __init__(self, path: Path, *, patience_s: float) -> None:
        self.path = str(path)
        self.loop = asyncio.new_event_loop()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.setblocking(False)
        self.gone: list[int] = []
        self.clients: list[socket.socket] = []
        numbers = count(1)
        self.door = LocalDoor(
            self.listener,
            self.loop,
            lambda: next(numbers),
            lambda peer, frame, descriptors: None,
            Line(self.loop, lambda: 0),
            too_long=lambda peer, why: None,
            gone=self.gone.append,
            share=Share(sessions=5, offers=7, strangers=STRANGERS, silent=0),
            patience_s=patience_s,
        )

    def connect(self, clients: int) -> None:
        for _ in range(clients):
            self.clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self.clients[-1].connect(self.path)
            self.door.accept()

    def close(self) -> None:
        for end in (*self.clients, self.listener):
            end.close()
        self.loop.close()


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[list[Scene]]:
    made = [Scene(tmp_path / "patient", patience_s=1e9), Scene(tmp_path / "hasty", patience_s=-1)]
    yield made
    for scene in made:
        scene.close()


def test_a_connection_without_a_session_is_closed_after_a_while_and_one_with_a_session_stays(
    scenes: list[Scene],
) -> None:
    patient, hasty = scenes
    for scene in scenes:
        scene.connect(2)
        scene.door.admit(1, is_lane=False)
        scene.door.show_strangers_out()
    assert patient.gone == []
    assert hasty.gone == [2]
    assert 1 in hasty.door.peers
    assert hasty.clients[1].recv(1) == b""


def test_the_oldest_connection_without_a_session_makes_room_for_a_new_one(scenes: list[Scene]) -> None:
    patient, _ = scenes
    patient.connect(1)
    patient.door.admit(1, is_lane=True)
    patient.connect(STRANGERS + 2)
    assert patient.gone == [2, 3]
    assert 1 in patient.door.peers

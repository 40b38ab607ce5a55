"""Plug-ins for kvserver that do not keep the contract, each in its own way."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
from obstore.store import LocalStore, MemoryStore

from kvserver.ipc.inheritance import Inheritance
from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.driver import Named, Start
from kvserver.remote.store import Facts, StoreError
from kvserver.wire.orders import ORDER_BYTES_MAX, RemoteIs, encode

MEMORY: dict[str, MemoryStore] = {}
"""What plug-ins of this process keep, by the option `memory`."""


class InMemory(CloudObjects):
    """Keeps the contract. The others do so but for one thing."""

    def __init__(self, options: dict[str, str], password: Callable[[], str]) -> None:
        memory = MEMORY.setdefault(options.get("memory", ""), MemoryStore())
        folder = options.get("path")  # of what processes share
        super().__init__(Place("s3", "memory"), stand_in=memory if folder is None else LocalStore(folder))
        self.options, self.password = options, password


class Raises(InMemory):
    """Raises whatever it is told, wherever it is told."""

    problem: BaseException = ZeroDivisionError("planted")

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        raise self.problem

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        raise self.problem

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        yield []
        raise self.problem

    def facts(self) -> Facts:
        raise self.problem

    def close(self) -> None:
        raise self.problem


class Hangs(InMemory):
    """Reads end when they are let go, and write then."""

    let_go = threading.Event()

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        if self.let_go.is_set():
            return super().read(name, pieces, within_s=within_s)
        self.let_go.wait(60)
        for _, target in pieces:
            target[:] = b"\xdd" * len(target)
        return True


class HangsAtOnce(InMemory):
    closed = 0

    def __init__(self, options: dict[str, str], password: Callable[[], str]) -> None:
        Hangs.let_go.wait(60)

    def close(self) -> None:
        HangsAtOnce.closed += 1


class NeedsMuch(InMemory):
    def __init__(self, options: dict[str, str], password: Callable[[], str]) -> None:
        raise KeyError("planted")


class Lies(InMemory):
    """Answers what the test says."""

    answers: object = None

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        return self.answers  # type: ignore[return-value]

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        return self.answers  # type: ignore[return-value]

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        return self.answers  # type: ignore[return-value]

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        return self.answers  # type: ignore[return-value]

    def facts(self) -> Facts:
        return self.answers  # type: ignore[return-value]


class EndsTargets(InMemory):
    """Fills and ends the memory that it was given."""

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        is_there = super().read(name, pieces, within_s=within_s)
        for _, target in pieces:
            target.release()
        return is_there


class OtherBytes(InMemory):
    """Gives other bytes than it got, behind the head."""

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        is_there = super().read(name, pieces, within_s=within_s)
        for _, target in pieces[1:]:
            target[len(target) // 2] ^= 1
        return is_there


class EndsTheProcess(InMemory):
    """As soon as it is asked for a chunk."""

    def starts(self, names: Sequence[str], most_bytes: int, *, within_s: float) -> list[Start | StoreError | None]:
        if any(name.count("/") > 3 for name in names):
            self.ends()
        return super().starts(names, most_bytes, within_s=within_s)

    def ends(self) -> None:
        os._exit(7)


class TellsTooMuch(EndsTheProcess):
    """Its process reports more than the brain reads."""

    def ends(self) -> None:
        control = msgspec.json.decode(sys.argv[1], type=Inheritance).control
        os.write(control, encode(RemoteIs("", ["n" * ORDER_BYTES_MAX])))


class TellsNonsense(EndsTheProcess):
    """Its process reports what is no report."""

    def ends(self) -> None:
        os.write(msgspec.json.decode(sys.argv[1], type=Inheritance).control, b"no report")

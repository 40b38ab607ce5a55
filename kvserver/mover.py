"""The mover process of device kind host: copies between registered pools and the arena, on orders of the brain.

It holds the mappings, never an index. It ends with the brain (end of its socket) and with the supervisor.
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
from typing import Never

import msgspec

from kvserver import logs
from kvserver.passing import Inheritance, Receiver, close_all, die_with_parent, send
from kvserver.transfer.engines import Completion, CopyEngine
from kvserver.transfer.self_test import self_test
from kvserver.wire.messages import BOARD_WORDS, GroupSpec
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    Cancel,
    Copy,
    Done,
    DropBoard,
    MapBoard,
    MapCache,
    MapFailed,
    Mapped,
    Order,
    Ready,
    Report,
    UnmapCache,
    Unmapped,
    decode_order,
    encode,
)

COMPLETIONS_PER_TURN = 64


class Mover:
    """Turns orders into calls of the copy engine, and completions into reports."""

    def __init__(self, brain: socket.socket, engine: CopyEngine) -> None:
        self._brain = brain
        self._engine = engine
        self._receiver = Receiver(ORDER_BYTES_MAX)
        self._mapped: set[int] = set()

    def run(self) -> None:
        """Until the brain's end of the socket closes."""
        self._report(Ready(os.getpid(), self._engine.backend))
        poll = select.poll()
        poll.register(self._brain, select.POLLIN)
        poll.register(self._engine.eventfd, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._engine.eventfd:
                    self._complete()
                elif not self._take_order():
                    return

    def _take_order(self) -> bool:
        frame, descriptors, cut = self._receiver.receive(self._brain)
        assert not cut, "the brain sends no order that is longer than ORDER_BYTES_MAX"
        if not frame:
            return False
        try:
            self._carry_out(decode_order(frame), descriptors)
        finally:
            close_all(descriptors)
        return True

    def _carry_out(self, order: Order, descriptors: list[int]) -> None:
        match order:
            case Copy():
                groups = [(group.group, group.first_block, group.block_ids, group.slots) for group in order.groups]
                self._engine.submit(order.job, order.kind, order.cache, order.word, order.generation, groups)
            case Cancel(job):
                self._engine.cancel(job)
            case MapBoard(session):
                self._engine.map_board(session, descriptors[0], BOARD_WORDS)
            case DropBoard(session):
                self._engine.drop_board(session)
            case MapCache():
                self._map_cache(order, descriptors)
            case UnmapCache(cache):
                self._unmap_cache(cache)

    def _map_cache(self, order: MapCache, descriptors: list[int]) -> None:
        sizes = [buffer.bytes for buffer in order.buffers]
        groups = [(order.chunk_tokens // group.block_tokens, group.blocks, _runs(group)) for group in order.groups]
        try:
            self._engine.map_cache(order.cache, order.session, descriptors, sizes, groups)
        except ValueError as refusal:
            code, _, message = str(refusal).partition(": ")
            self._report(MapFailed(order.cache, code, message))
        except OSError as problem:
            self._report(MapFailed(order.cache, "descriptor", f"cannot be mapped: {problem}"))
        else:
            self._mapped.add(order.cache)
            self._report(Mapped(order.cache))

    def _unmap_cache(self, cache: int) -> None:
        """Of a cache that was refused the brain may not have heard yet when its client died."""
        if cache in self._mapped:
            self._mapped.remove(cache)
            self._engine.unmap_cache(cache)

    def _complete(self) -> None:
        os.eventfd_read(self._engine.eventfd)
        while True:
            completions = self._engine.completions(COMPLETIONS_PER_TURN)
            for completion in completions:
                self._report(_as_report(completion))
            if len(completions) < COMPLETIONS_PER_TURN:
                return

    def _report(self, report: Report) -> None:
        send(self._brain, encode(report))


def _runs(group: GroupSpec) -> list[tuple[int, int, int, int, int, int]]:
    return [
        (run.buffer, run.offset, run.regions, run.region_stride, run.block_stride, run.page_bytes)
        for run in group.regions
    ]


def _as_report(completion: Completion) -> Report:
    number, status, count, copy_ns, code, message = completion
    if status == "unmapped":
        return Unmapped(number)
    return Done(number, status, count, copy_ns, code, message)


def main() -> Never:
    """`python -m kvserver.mover INHERITANCE`: started by the supervisor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    config = inherited.config
    logs.start(level=config.log_level, form=config.log_format, process=f"mover {inherited.mover}")
    gc.freeze()
    self_test()
    engine = CopyEngine(inherited.arena, config.arena_bytes, config.copy_threads)
    try:
        Mover(socket.socket(fileno=inherited.control), engine).run()
    except (BrokenPipeError, ConnectionResetError):
        logs.event(logging.INFO, "mover ends", ("why", "the brain is gone"))
    os._exit(0)  # running copies need not end: whoever asked for them is told that this process is gone


if __name__ == "__main__":
    main()

"""The brain's process: the only file with sockets, clock and loop around the pure Service.

Requests come in at two doors: ZeroMQ (zmq_listener.py) and the local sockets (local_listener.py). The service handles
each request, and its effects are carried out in order. Clients take turns by their cost (fair_turns.py), so none can
monopolize the brain.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

import msgspec
import uvloop

from kvserver import __version__, logs
from kvserver.brain.bounds import bounds_from
from kvserver.brain.fair_turns import Line
from kvserver.brain.http.admin import AdminDoor, TellOutcome
from kvserver.brain.http.server import HttpServer, Snapshot, SnapshotBoard
from kvserver.brain.listeners import Board, MoverDoor, SupervisorDoor, open_door, read_request
from kvserver.brain.local_listener import LocalDoor
from kvserver.brain.offers import Offers
from kvserver.brain.zmq_listener import LONG_BYTES, ZmqDoor
from kvserver.config.config import Config
from kvserver.config.descriptor_limit import Share, fit
from kvserver.errors import ConfigError
from kvserver.ipc.fd_sockets import Receiver, close_all, peer_pidfd
from kvserver.ipc.inheritance import CANNOT_START, Inheritance, die_with_parent
from kvserver.service.base import events
from kvserver.service.base.effects import (
    Answer,
    AnswerWithBoard,
    AnswerWithMover,
    Ask,
    Audit,
    ChangeLogLevel,
    CloseDescriptors,
    CloseSession,
    DropNamespace,
    Effect,
    GoOn,
    Instruct,
    Log,
    Publish,
    PutNamespace,
    Tell,
    Withdraw,
)
from kvserver.service.service import Service
from kvserver.transfer.native import Ledger, create_memfd
from kvserver.wire.admin import AnyCommand, Outcome
from kvserver.wire.codec import Malformed, encode
from kvserver.wire.messages import (
    BOARD_WORDS,
    FRAME_BYTES_MAX,
    Attached,
    Error,
    Found,
    LaneOpen,
    Lookup,
    Offer,
    Reply,
    Welcome,
)
from kvserver.wire.orders import (
    ORDER_BYTES_MAX,
    FoundRecords,
    Grown,
    KillMover,
    MoverReaped,
    MoverStarted,
    decode_news,
)
from kvserver.wire.zmtp import Message

if TYPE_CHECKING:
    from kvserver.brain.publisher import Publisher

MOVERS_DESCRIPTORS = 2
REPORTS_PER_TURN = 8
"""Reports from one mover. Each takes 0.2 ms including the orders that follow; with 32, retrieves took twice as long."""
TICK_S = 0.05
SNAPSHOT_TICKS = 5
COLLECT_TICKS = 20
ADMISSIONS = (Attached, LaneOpen)
"""Replies after which a local connection belongs to a session."""
ACCEPT_AGAIN_S = 1.0
"""Pause in accepting after the process ran out of descriptors."""


class Shell:
    """Sockets, processes and time for one Service."""

    def __init__(self, config: Config, share: Share, control: socket.socket, ledger: Ledger, incarnation: int) -> None:
        self._config = config
        self._share = share
        self._control = control
        self._supervisor = SupervisorDoor(control)
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._service = Service(
            bounds_from(config),
            os.urandom,
            server=f"kvserver {__version__}",
            incarnation=incarnation,
            started_ns=time.monotonic_ns(),
            documents=ledger.namespaces(),
            records=ledger.scan(),
            damaged=ledger.damaged,
        )
        self._counters = self._service.counters
        self._snapshots = SnapshotBoard()
        self._receiver = Receiver(ORDER_BYTES_MAX, 4)
        self._last_peer = self._ticks = 0
        self._offers = Offers(share.offers)
        self._operators: dict[int, TellOutcome] = {}
        """Peer of an operator's command -> callback for its outcome. Each command has its own peer."""
        self._boards: dict[int, Board] = {}
        self._movers: dict[int, MoverDoor] = {}
        self._publisher: Publisher | None = None
        self._stopping = asyncio.Event()
        self._line = Line(self._loop, lambda: self._counters.errors["request"])
        self._zmq_listener = open_door(config, "", socket.SOCK_STREAM)
        self._zmq = ZmqDoor(
            self._zmq_listener,
            self._loop,
            self._next_peer,
            self._arrived_by_zmq,
            self._line,
            gone=lambda peer: self._handle(events.PeerGone(peer)),
            strangers_max=share.strangers,
        )
        self._local_listener = open_door(config, ".local", socket.SOCK_SEQPACKET)
        self._local = LocalDoor(
            self._local_listener,
            self._loop,
            self._next_peer,
            self._arrived,
            self._line,
            too_long=lambda peer, why: self._refuse_frame(peer, "frame-size", why),
            gone=lambda peer: self._handle(events.PeerGone(peer)),
            share=share,
            patience_s=config.attach_ttl_ms / 1000,
        )
        self._effects: dict[type, Callable[..., object]] = {
            Publish: lambda effect: self._ledger.seal(effect.records),
            Withdraw: lambda effect: self._ledger.clear(effect.offsets),
            PutNamespace: lambda effect: self._ledger.put_namespace(effect.number, effect.document),
            DropNamespace: lambda effect: self._ledger.drop_namespace(effect.number),
            Answer: lambda effect: self._answer(effect.peer, effect.reply),
            AnswerWithBoard: self._answer_with_board,
            AnswerWithMover: self._answer_with_mover,
            Instruct: self._instruct,
            Ask: lambda effect: self._supervisor.tell(effect.wish),
            CloseDescriptors: lambda effect: close_all(self._offers.take(effect.numbers)),
            CloseSession: self._close_session,
            GoOn: lambda _: self._loop.call_soon(self._handle, events.GoOn()),
            Log: lambda effect: logs.event(effect.level, effect.event, *effect.fields),
            Audit: lambda effect: logs.audit(*effect.fields),
            ChangeLogLevel: lambda effect: logs.set_level(effect.level),
        }
        if config.events_endpoint:
            self._publish_events(incarnation)

    def _publish_events(self, incarnation: int) -> None:
        from kvserver.brain.publisher import Publisher  # noqa: PLC0415 - libzmq takes an eighth of all imports

        publisher = self._publisher = Publisher(self._config, incarnation)
        self._effects[Tell] = lambda effect: publisher.publish(effect.events)

    async def run(self) -> None:
        """Serves until SIGTERM, or until the supervisor is gone."""
        self._carry_out(self._service.effects())
        http = self._start_http()
        self._loop.set_exception_handler(_die)
        self._loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._loop.add_reader(self._zmq_listener, self._accept, self._zmq_listener, self._zmq.accept)
        self._loop.add_reader(self._local_listener, self._accept, self._local_listener, self._local.accept)
        self._loop.add_reader(self._control, self._take_news)
        self._tick()
        logs.event(logging.INFO, "server ready", ("socket", self._config.socket), ("http_port", self._config.http_port))
        await self._stopping.wait()
        if http is not None:
            http.close()
        if self._publisher is not None:
            self._publisher.close()
        logs.event(logging.INFO, "brain stops")

    def _start_http(self) -> HttpServer | None:
        if not self._config.http_port:
            return None
        admin = AdminDoor(self._config, self._command)
        config = self._config
        http = HttpServer(
            self._snapshots,
            host=config.http_host,
            port=config.http_port,
            names=config.http_names,
            config=msgspec.to_builtins(config),
            admin=admin,
            silent_max=self._share.silent,
        )
        http.start()
        return http

    # ---------------------------------------------------------------- events

    def _handle(self, event: events.Event) -> None:
        self._carry_out(self._service.handle(event, time.monotonic_ns()))

    def _arrived(self, peer: int, frame: memoryview | bytes, descriptors: list[int]) -> None:
        """Handles one request, or refuses a malformed one. Takes ownership of the descriptors."""
        try:
            request = read_request(frame, local=peer in self._local.peers)
        except Malformed as malformed:
            close_all(descriptors)
            self._counters.errors["request"] += 1
            self._answer(peer, malformed.reply)
            return
        number = -1
        if isinstance(request, Offer) and len(descriptors) == 1:
            held = sum(door.held for door in self._movers.values())
            if why := self._offers.no_room(peer, with_movers=held):
                close_all(descriptors)
                self._answer(peer, Error(request.id, "resource", "descriptors", why))
                return
            number = self._offers.add(peer, descriptors[0])
        else:
            close_all(descriptors)
        if isinstance(request, Lookup):
            answered, began_ns = self._counters.lookups, time.monotonic_ns()
            effects = self._service.handle(events.Arrived(peer, request, number), began_ns)
            ended_ns = time.monotonic_ns()
            self._carry_out(effects)  # first, because an engine's step waits for the reply
            if self._counters.lookups > answered:  # the time of a refused lookup would distort the histogram
                self._service.lookup_took(ended_ns - began_ns)
        else:
            self._handle(events.Arrived(peer, request, number))

    def _next_peer(self) -> int:
        self._last_peer += 1
        return self._last_peer

    def _arrived_by_zmq(self, peer: int, message: Message) -> None:
        if message.parts > 1:
            self._refuse_frame(peer, "frame", f"{message.parts} parts; a message is one part")
        elif message.frame is None:
            self._refuse_frame(peer, "frame-size", f"{message.bytes} bytes, at most {FRAME_BYTES_MAX} are read")
        else:
            self._arrived(peer, message.frame, [])

    def _accept(self, listener: socket.socket, accept: Callable[[], None]) -> None:
        try:
            accept()
        except OSError as problem:  # out of descriptors or memory, for now
            logs.event(logging.WARNING, "connection not accepted", ("why", problem.strerror))
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_AGAIN_S, self._loop.add_reader, listener, self._accept, listener, accept)

    def _drain_reports(self, number: int, door: MoverDoor) -> None:
        for _ in range(REPORTS_PER_TURN):
            if self._movers.get(number) is not door:
                return
            try:
                report = door.report(self._receiver)
            except BlockingIOError:
                return
            if report is None:
                return
            self._handle(events.Reported(number, report))
            if isinstance(report, FoundRecords):
                gc.freeze()  # now, since these objects stay: collecting 100,000 chunks would stop the brain for 60 ms
                return  # the mover always has the next batch of records ready, and others wait

    def _take_news(self) -> None:
        frame, descriptors, _ = self._receiver.receive(self._control)
        if not frame:
            self._stopping.set()
            return
        match decode_news(frame):
            case MoverStarted(mover) if len(descriptors) != MOVERS_DESCRIPTORS:
                close_all(descriptors)  # the kernel dropped some: this process has no room for them
                self._supervisor.tell(KillMover(mover))
            case MoverStarted(mover):
                end = socket.socket(fileno=descriptors[0])
                end.setblocking(False)
                door = self._movers[mover] = MoverDoor(end, descriptors[1], self._loop)
                self._loop.add_reader(end, self._drain_reports, mover, door)
            case MoverReaped(mover, how):
                self._close_mover(mover)
                self._handle(events.MoverGone(mover, how))
            case Grown(slabs, problem, placement):
                self._handle(events.ArenaGrew(slabs, problem, placement))

    def _tick(self) -> None:
        self._loop.call_later(TICK_S, self._tick)
        self._handle(events.Tick())
        self._line.tick()
        self._local.show_strangers_out()
        self._ticks += 1
        if self._ticks % SNAPSHOT_TICKS == 0:
            status = self._service.status(time.monotonic_ns())
            self._snapshots.publish(Snapshot(time.monotonic(), status, self._counters.copy()))
        if self._ticks % COLLECT_TICKS == 1:
            self._supervisor.alive()
            self._zmq.close_broken()
            self._local.close_broken()
        if self._ticks % COLLECT_TICKS == 0:
            gc.collect(1)
            self._ledger.forget_pages()
            gc.freeze()  # a full collection over the index would stop the brain for a second

    def _command(self, who: str, command: AnyCommand, tell: TellOutcome) -> None:
        """Handles an operator's command that came in over HTTP."""
        peer = self._next_peer()
        self._operators[peer] = tell
        self._handle(events.Commanded(peer, who, command))

    # ---------------------------------------------------------------- effects

    def _refuse_frame(self, peer: int, code: str, message: str) -> None:
        self._counters.errors["request"] += 1
        self._answer(peer, Error(0, "request", code, message))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._effects[type(effect)](effect)

    def _answer(self, peer: int, reply: Reply | Outcome, descriptor: int = -1) -> None:
        """Sends a reply without waiting. A peer that is gone or does not read loses its replies.

        A local connection that takes no reply is closed."""
        if peer in self._operators:
            self._operators.pop(peer)(reply)  # type: ignore[arg-type]
            return
        frame = encode(reply)
        if peer in self._local.peers:
            if type(reply) in ADMISSIONS:
                self._local.admit(peer, is_lane=type(reply) is LaneOpen)
            if not self._local.send(peer, frame, () if descriptor < 0 else (descriptor,)):
                self._drop(reply)
            return
        if isinstance(reply, Welcome):
            self._zmq.welcome(peer)
        if len(frame) > LONG_BYTES and not self._zmq.reads(peer):
            self._counters.errors["resource"] += 1
            frame = encode(Error(reply.id, "resource", "unread", "the replies before this one were not read yet"))
        if not self._zmq.send(peer, frame):
            self._drop(reply)

    def _drop(self, reply: Reply | Outcome) -> None:
        """Counts a reply that is not delivered, and ends its lease, which would keep its chunks until it expires."""
        self._counters.replies_dropped += 1
        if isinstance(reply, Found) and reply.lease:
            self._loop.call_soon(self._handle, events.Unheard(reply.lease))

    def _answer_with_board(self, effect: AnswerWithBoard) -> None:
        connection = self._local.end_of(effect.peer)
        if connection is None:
            return
        try:
            board = self._boards[effect.session] = Board(create_memfd("kvserver-board", BOARD_WORDS * 8))
            pidfd = peer_pidfd(connection)
        except OSError as problem:
            if not isinstance(problem, ProcessLookupError):
                logs.event(logging.WARNING, "worker not attached", ("session", effect.session), ("why", problem))
            self._loop.call_soon(self._handle, events.WorkerGone(effect.session))
            return
        if pidfd is None:
            logs.event(logging.WARNING, "worker in another process namespace", ("session", effect.session))
        else:
            board.pidfd = pidfd
            self._loop.add_reader(pidfd, self._worker_gone, effect.session, pidfd)
        self._answer(effect.peer, effect.reply, board.descriptor)

    def _worker_gone(self, session: int, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        self._handle(events.WorkerGone(session))

    def _answer_with_mover(self, effect: AnswerWithMover) -> None:
        door = self._movers.get(effect.mover)
        if door is None:
            self._answer(effect.peer, Error(effect.reply.id, "device", "mover-lost", f"mover {effect.mover} is gone"))
        else:
            self._answer(effect.peer, effect.reply, door.pidfd)

    def _instruct(self, effect: Instruct) -> None:
        """Sends an order with its descriptors, which are closed here afterwards."""
        descriptors = self._offers.take(effect.descriptors)
        door = self._movers.get(effect.mover)
        if door is None:
            close_all(descriptors)
            return
        try:
            if effect.board and effect.board in self._boards:
                descriptors.append(os.dup(self._boards[effect.board].descriptor))
        except OSError as problem:
            close_all(descriptors)
            door.kill(f"it cannot be given a board: {problem}")
            return
        door.send(effect.order, descriptors)

    # ---------------------------------------------------------------- ends

    def _close_session(self, effect: CloseSession) -> None:
        board = self._boards.pop(effect.session, None)
        if board is not None:
            os.close(board.descriptor)
            if board.pidfd >= 0:
                self._loop.remove_reader(board.pidfd)
                os.close(board.pidfd)
        for peer in effect.peers:
            if peer in self._local.peers:
                self._local.drop(peer)
            else:
                self._zmq.forget(peer)

    def _close_mover(self, number: int) -> None:
        door = self._movers.pop(number, None)
        if door is not None:
            door.close()


def _die(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends the process after an exception that nobody handled: it is a bug, and tables may be half changed.

    The supervisor starts another brain over the sealed chunks."""
    problem = context.get("exception")
    logging.getLogger("kvserver").critical("brain dies of a bug: %s", context["message"], exc_info=problem)
    os._exit(1)


def main() -> Never:
    """The process `python -m kvserver.brain.process INHERITANCE`, which the supervisor starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inherited = msgspec.json.decode(sys.argv[1], type=Inheritance)
    die_with_parent(inherited.parent)
    config = inherited.config
    logs.start(level=config.log_level, form=config.log_format, process="brain")
    gc.disable()  # by hand, in _tick
    gc.freeze()
    control = socket.socket(fileno=inherited.control)

    async def serve() -> None:
        ledger = Ledger(inherited.ledger, config.ledger_span_bytes)
        await Shell(config, share, control, ledger, inherited.incarnation).run()

    try:
        config, share = fit(inherited.config)
        uvloop.run(serve())
    except ConfigError as error:
        logs.event(logging.ERROR, "brain cannot start", ("why", str(error)))
        sys.stderr.write(f"kvserver: {error}\n")  # the reason as the command itself gives it
        sys.stderr.flush()
        os._exit(CANNOT_START)
    os._exit(0)


if __name__ == "__main__":
    main()

"""Effects that the service has for the shell, in their order."""

import logging

from kvserver.errors import DeviceError, KvError, RequestError, ResourceError
from kvserver.service.base.effects import Answer, CloseDescriptors, Effect, Instruct, Log
from kvserver.service.state.movers import Mover
from kvserver.service.telling.counters import Counters
from kvserver.wire.admin import Outcome
from kvserver.wire.codec import error_reply
from kvserver.wire.messages import Reply
from kvserver.wire.orders import Order


class Outbox:
    """Collects the effects of an event."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._effects: list[Effect] = []

    def emit(self, *effects: Effect) -> None:
        self._effects += effects

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def answer(self, peer: int, reply: Reply | Outcome) -> None:
        self._effects.append(Answer(peer, reply))

    def refuse(self, peer: int, request_id: int, error: KvError) -> None:
        """Answers with a typed error, counted by family."""
        self.counters.errors[error.family] += 1
        match error:
            case RequestError() | ResourceError() | DeviceError():
                self.answer(peer, error_reply(request_id, error))
            case _:
                raise error

    def instruct(self, mover: Mover, order: Order, descriptors: tuple[int, ...] = (), board: int = 0) -> None:
        """Sends an order, or keeps it until the mover is ready. A killed mover gets none."""
        instruct = Instruct(mover.number, order, descriptors, board)
        if mover.state == "ready":
            self.emit(instruct)
        elif mover.state == "starting":
            mover.queue.append(instruct)

    def close(self, descriptors: tuple[int, ...]) -> None:
        if descriptors:
            self.emit(CloseDescriptors(descriptors))

    def log(self, event: str, *fields: tuple[str, object], level: int = logging.INFO) -> None:
        self.emit(Log(level, event, fields))

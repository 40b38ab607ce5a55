"""The scheduler half of the vLLM connector: translates what vLLM's scheduler says and asks to kvclient.offload.

Rule 1: it decides nothing. Rule 2: a step that has other work waits for nobody, or for the moment that it was allowed.
Requests are looked up when they come or are matched, and answers collected when the engine comes by; an engine with
nothing else to do waits for one, no longer than a lookup may take. A server that did not answer is not asked again
before it has given a sign of life (Inquiries). Rule 3: blocks of a store are pinned in the engine's pool, so that
neither the end nor a preemption of their request can give them to somebody else.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvclient.client import Client
from kvclient.keys import LONG_TOKENS, Naming
from kvclient.offload import Offload
from kvclient.offload_asking import Asking
from kvclient.offload_ends import Report
from kvclient.offload_values import Options, RetrieveOrder, StoreOrder
from kvclient.values import RetrieveResult
from kvclient.vllm_doubts import Doubts
from kvclient.vllm_hbm import Holdings
from kvclient.vllm_keys import Keyer, Request
from kvclient.vllm_pins import Pins, Pool
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

log = logging.getLogger("vllm.kvserver.scheduler")

ASKED_EACH_STEP = 4
"""Of those that nobody has matched yet: each costs the step some 50 us."""


class Scheduled(NamedTuple):
    """A request of this step."""

    name: str
    begin: int
    """Leading tokens that were computed, or brought, before the step."""
    tokens: int
    """Leading tokens that are computed when the step is done."""
    loads_within: bool = True
    """Some request of the step is loaded within it, or nobody knows; never by us."""


class _Live:
    """A request that has begun and not finished."""

    def __init__(self, request: Request, extra: bytes | None) -> None:
        self.request = request
        self.extra = extra
        """What starts its keys; None for a request that has none."""
        self.chunks = 0
        """That have keys."""
        self.key = b""
        """The last of them."""
        self.hbm_tokens = 0
        self.disk_tokens = 0
        """Of those that its last retrieve is to bring."""


class Scheduler:
    """One engine's scheduler. Belongs to its thread."""

    def __init__(
        self,
        client: Client,
        options: Options,
        keyer: Keyer,
        *,
        store_output: bool,
        is_async: bool = False,
        step_wait_s: float = 0.0,
        stores_over: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        """is_async: a step is scheduled before the one ahead of it is over.
        step_wait_s: what a step that has other work may wait for answers, all its requests together.
        stores_over: (job, rank) of stores that have ended, of ranks in this process, before they report it."""
        self._stores_over = stores_over
        self._offload = Offload(options)
        self._asking = Asking(client, self._offload, log)
        self._holdings = Holdings(options.groups)
        self._chunk_tokens = options.chunk_tokens
        self._doubts = Doubts(max(group.block_tokens for group in options.groups), is_async=is_async)
        self._patience_s = options.lookup_deadline_s
        self._step_wait_s = self._step_wait_left_s = step_wait_s
        self._keyer = keyer
        self._store_output = store_output
        self._told: dict[str, int] = {}
        self._ranks = options.ranks
        self._said: dict[int, bytes] = {}
        """By rank: the namespace."""
        self._live: dict[str, _Live] = {}
        self._known_tokens: dict[str, int] = {}
        """Of requests that were matched and do not compute yet: what the engine has, or is brought by us."""
        self._unnamed: dict[str, Naming] = {}
        """Requests that have not begun: their keys are being made."""
        self._computing: set[str] = set()
        """Requests of the last step that have not finished: the engine has work."""
        self.pins = Pins(options.ranks)
        self.untold: list[RetrieveOrder] = []
        """Retrieves that the engine waits for and no rank knows of yet."""

    def use_pool(self, pool: Pool) -> None:
        self.pins.use_pool(pool)
        self._holdings.use_pool(pool)

    def use_namespace(self, namespaces: set[bytes]) -> None:
        """What the ranks have registered under. Until then nothing is looked up or stored."""
        if len(namespaces) != 1:
            raise RequestError("namespace", f"the ranks say {len(namespaces)} namespaces; expected one")
        (self._asking.namespace,) = namespaces

    def learn(self, namespaces: Iterable[tuple[int, bytes]]) -> None:
        """Of single ranks, which may come to know theirs in different steps; used when all of them have said it."""
        for rank, namespace in namespaces:
            self._said[rank] = namespace
            if len(self._said) == self._ranks:
                self.use_namespace({*self._said.values(), *filter(None, [self._asking.namespace])})

    # ---------------------------------------------------------------- requests

    def new(self, request: Request) -> None:
        """Idempotent: releases that do not tell of new requests are asked for them first."""
        name = request.request_id
        if name in self._live:
            return
        try:
            extra = self._keyer.extra(request)
            keys = self._keyer.begin(request, extra=extra)
        except RequestError as problem:
            self._leave_uncached(request, problem)
            return
        live = self._live[name] = _Live(request, extra)
        if isinstance(keys, bytes):
            self._begin(live, keys)
            if keys and (request.num_tokens < LONG_TOKENS or not self._keyer.takes_hashes):
                self._ask_now(name)  # otherwise match() asks, or a step: no call has to do all of it
        else:
            self._unnamed[name] = keys

    def match(self, request: Request, hbm_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be retrieved, and whether that happens between steps; (None, False): ask again."""
        self.new(request)
        if request.request_id in self._unnamed and not self._names_now(request.request_id):
            return None, False
        live = self._live[request.request_id]
        live.hbm_tokens = self._known_tokens[request.request_id] = hbm_tokens
        if not self._asking.namespace:
            return 0, False
        self._asking.notice_a_loss()
        self._asking.listen()
        self._asking.send()  # what the last call has left
        self._unpin()
        tokens = self._match(request, hbm_tokens)
        if self._may_wait or not self._asking.connected:
            self._asking.send()  # otherwise the next call does, here or in step()
            if tokens is None:
                tokens = self._wait_and_match(request, hbm_tokens)
        return tokens, bool(tokens)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """external_tokens: of what match() said, or 0 when the scheduler retrieves nothing (now)."""
        live = self._live.get(request.request_id)
        if live is None:
            return
        self._settle(request.request_id)
        if external_tokens == 0:
            self._offload.admitted(request.request_id, hbm_tokens=live.hbm_tokens)
            return
        order = self._offload.allocated(
            request.request_id, hbm_tokens=live.hbm_tokens, tables=tables, tokens=external_tokens
        )
        assert order is not None, "match() knew the engine's own tokens"
        self._known_tokens[request.request_id] = order.end_tokens
        self._doubts.brought(_only_table(tables), begin=live.hbm_tokens, end=order.end_tokens)
        live.disk_tokens = order.disk_tokens
        self.untold.append(order)

    def disk_tokens(self, name: str) -> int:
        """After allocated(): how many of the tokens that are retrieved the server had on disk."""
        return self._live[name].disk_tokens if name in self._live else 0

    def finished(self, name: str, tables: Sequence[Sequence[int]] = ()) -> None:
        """Finished or aborted. Jobs in flight go on: a retrieve's blocks stay until the worker has reported its end,
        a store's are pinned, and with them the request's others (tables: its blocks, by group)."""
        self.pins.keep(name, tables)
        self._computing.discard(name)
        if name in self._live:
            self._leave_unnamed(name)
            self._known_tokens.pop(name, None)
            self._doubts.forget(name, said_tokens=self._live[name].request.num_tokens)
            del self._live[name]
            self._offload.finish(name)

    # ---------------------------------------------------------------- steps

    def step(
        self, scheduled: Iterable[Scheduled], tables_of: Any
    ) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        """What the workers are to do in this step. tables_of: the block ids of a request, by group."""
        self._asking.listen()
        self._tidy()
        if self._unnamed:
            self._name_some()
        self._ask_ahead()
        items = list(scheduled)
        if self._known_tokens or self._doubts:
            for item in items:
                self._notice(item, tables_of)
        is_doubtful = bool(self._doubts)
        stores = []
        self._computing.clear()
        self._step_wait_left_s = self._step_wait_s
        if self._asking.namespace:
            now_s = time.monotonic()
            for item in items:
                self._computing.add(item.name)
                if is_doubtful and self._is_held_back(item, tables_of):
                    continue
                order = self._store(item, tables_of, now_s)
                if order is not None:
                    stores.append(order)
        retrieves = tuple(self.untold)
        self.untold.clear()
        self.pins.told()
        return retrieves, tuple(stores)

    def collect(self) -> None:
        """Between two steps: takes the answers that came meanwhile, so that the match that needs one only decides."""
        if len(self._asking):
            self._asking.listen()

    def ended(self, reports: Iterable[Report]) -> None:
        """What the ranks have reported."""
        for report in reports:
            self.pins.reported(report.job, report.rank)
            if isinstance(report.result, RetrieveResult):
                self._offload.retrieve_ended(report.job, report.rank, report.result)
            else:
                self._offload.store_ended(report.job, report.rank, report.result)
        self._tidy()

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by name; see offload_values.Statistics."""
        now = dict(vars(self._offload.statistics))
        skipped = now.pop("skipped_tokens")
        counts = {name: value for name, value in now.items() if not name.endswith("_in_flight")}
        counts |= {f"skipped_tokens:{why}": tokens for why, tokens in skipped.items()}
        told, self._told = self._told, counts
        return {name: grown for name, value in counts.items() if (grown := value - told.get(name, 0))}

    def busy(self) -> bool:
        """Whether an idle engine has to go on stepping, so that ends are delivered."""
        return self._offload.busy() or len(self._asking) > 0

    def reset(self) -> None:
        """The engine's weights may be others now: nothing that was stored before is found by it again."""
        self._keyer.reset()
        for name, live in list(self._live.items()):
            self._leave_unnamed(name)
            self._offload.finish(name)
            del self._live[name]
            if live.request.num_computed_tokens:
                self._begin_unkeyed(live.request, "reset")
            else:
                self.new(live.request)
        self._unpin()  # vLLM refuses to forget its blocks while some are held, and is asked again

    def close(self) -> None:
        self._asking.close()

    # ---------------------------------------------------------------- helpers

    def _begin(self, live: _Live, keys: bytes) -> None:
        self._add_keys(live, keys)
        self._offload.begin(
            live.request.request_id,
            tokens=live.request.num_prompt_tokens,
            keys=keys,
            reads=not getattr(live.request, "skip_reading_prefix_cache", False),
        )

    def _settle(self, name: str) -> None:
        """The request has its keys from now on. To wait for them takes no longer than to make them here."""
        naming = self._unnamed.pop(name, None)
        if naming is None:
            return
        request = self._live[name].request
        try:
            keys = naming.keys()
        except RequestError as problem:
            self._leave_uncached(request, problem)
        else:
            self._begin(self._live[name], keys)

    def _names_now(self, name: str) -> bool:
        """Whether it has its keys, for which a step that has other work does a piece, and waits if it may."""
        naming = self._unnamed[name]
        if self._computing:
            is_copied = naming.go_on()
            while not is_copied and self._may_wait:
                is_copied = self._waits(lambda _: naming.go_on())
            if not naming.ready and not (is_copied and self._may_wait and self._waits(naming.wait)):
                return False
        self._settle(name)
        return True

    def _name_some(self) -> None:
        """Once in each step, so that requests get their keys also while nobody matches them: a piece of the oldest."""
        next(iter(self._unnamed.values())).go_on()
        for name in [name for name, naming in self._unnamed.items() if naming.ready]:
            self._settle(name)

    def _leave_unnamed(self, name: str) -> None:
        """Nobody needs the keys any more."""
        if self._unnamed.pop(name, None) is not None:
            self._begin(self._live[name], b"")

    def _leave_uncached(self, request: Request, problem: RequestError) -> None:
        log.debug("request not cached request=%s %s", request.request_id, problem)
        self._begin_unkeyed(request, problem.code)

    def _begin_unkeyed(self, request: Request, why: str) -> None:
        self._live[request.request_id] = _Live(request, None)
        self._offload.begin_unkeyed(request.request_id, tokens=request.num_prompt_tokens, why=why)

    def _unpin(self) -> None:
        """Reports come with steps. An engine that made none meanwhile would find its pool full of blocks that nobody
        reads any more, and make an empty step to hear so."""
        if len(self.pins):
            for job, rank in self._stores_over():
                self.pins.reported(job, rank)

    def _match(self, request: Request, hbm_tokens: int) -> int | None:
        return self._offload.match(
            request.request_id, tokens=request.num_tokens, hbm_tokens=hbm_tokens, now_s=time.monotonic()
        )

    def _wait_and_match(self, request: Request, hbm_tokens: int) -> int | None:
        """match() once more, if the answer is there already or the engine has nothing else to do than wait for it."""
        tokens = None
        while tokens is None and self._offload.is_asking(request.request_id):
            if not (self._waits(self._asking.wait) if self._computing else self._asking.wait(self._patience_s)):
                break
            tokens = self._match(request, hbm_tokens)
            self._asking.send()
        return tokens

    @property
    def _may_wait(self) -> bool:
        """Whether nothing else is to be done, or the step has not waited yet for as long as it may."""
        return not self._computing or self._step_wait_left_s > 0

    def _waits(self, wait: Callable[[float], bool]) -> bool:
        """In a step that has other work, for no longer than such a step may; whether that was long enough."""
        if self._step_wait_left_s <= 0:
            return wait(0.0)
        began_s = time.monotonic()
        is_over = wait(self._step_wait_left_s)
        self._step_wait_left_s -= time.monotonic() - began_s
        return is_over

    def _ask_now(self, name: str) -> None:
        """For a request that is new, if not too many are asked for ahead: then a step does, later."""
        if self._asking.namespace and self._offload.next_to_ask() is not None:
            self._ask(name)
            self._asking.send()

    def _ask_ahead(self) -> None:
        for _ in range(ASKED_EACH_STEP):
            if not self._asking.namespace or (name := self._offload.next_to_ask()) is None:
                break
            self._ask(str(name))
        self._asking.send()

    def _ask(self, name: str) -> None:
        held = self._holdings.tokens_of(self._live[name].request)
        self._offload.ask(name, time.monotonic(), hbm_tokens=held)

    def _store(self, item: Scheduled, tables_of: Any, now_s: float) -> StoreOrder | None:
        live = self._live.get(item.name)
        if live is None or live.extra is None:
            return None
        if self._store_output and (live.chunks + 1) * self._chunk_tokens <= live.request.num_tokens:
            keys = self._more_keys(live)
            if keys:
                self._offload.extend(item.name, keys)
        if not self._offload.computed(item.name, item.tokens, now_s):
            return None
        order = self._offload.store(item.name, tables_of(item.name))
        if order is not None:
            self.pins.pin(order)
        return order

    def _notice(self, item: Scheduled, tables_of: Any) -> None:
        known = self._known_tokens.pop(item.name, None)
        if known is not None and known < item.begin and not item.loads_within:
            # What was brought between steps has not failed.
            self._doubts.brought(_only_table(tables_of(item.name)), begin=known, end=item.begin)
            known = item.begin
        live = self._live.get(item.name)
        if live is None or (known is None and not self._doubts):
            return
        self._doubts.notice(
            item.name,
            _only_table(tables_of(item.name)),
            begin=item.begin,
            end=item.tokens,
            known=known,
            said_tokens=live.request.num_tokens,
        )

    def _is_held_back(self, item: Scheduled, tables_of: Any) -> bool:
        """For another connector's sake."""
        table = _only_table(tables_of(item.name))
        return self._doubts.holds_back(item.name, table, begin=item.begin, end=item.tokens)

    def _more_keys(self, live: _Live) -> bytes:
        """Of the chunks that have none yet."""
        assert live.extra is not None
        keys = self._keyer.keys(live.request, extra=live.extra, parent=live.key, first_chunk=live.chunks)
        self._add_keys(live, keys)
        return keys

    def _add_keys(self, live: _Live, keys: bytes) -> None:
        live.chunks += len(keys) // KEY_BYTES
        live.key = keys[-KEY_BYTES:] or live.key

    def _tidy(self) -> None:
        self._asking.give_back()
        for summary in self._offload.take_summaries():
            log.info("%s", summary)


def _only_table(tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Of a model with one group of layers; of others doubts are about requests alone."""
    return tables[0] if len(tables) == 1 else ()

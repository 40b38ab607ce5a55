"""The scheduler half of the vLLM connector: translates between vLLM's scheduler and kvclient.offload.

Rule 1: it decides nothing.

Rule 2: a step with other work does not wait for the server, except for the short time set by step_wait_s. Requests are
looked up when they arrive or are matched. Answers are collected whenever vLLM calls. An engine with nothing else to do
waits for an answer, but no longer than the lookup deadline. A server that did not answer is asked again only after it
has shown a sign of life (Inquiries).

Rule 3: a store's blocks are pinned in the engine's pool. Neither the end nor the preemption of the request can give
them to another request.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvclient.client import Client
from kvclient.keys import LONG_TOKENS, Naming
from kvclient.offload.decide import Offload
from kvclient.offload.job_ends import Report
from kvclient.offload.lookup_exchange import LookupExchange
from kvclient.offload.values import Options, RetrieveOrder, StoreOrder
from kvclient.values import RetrieveResult
from kvclient.vllm.answers import Answers
from kvclient.vllm.events import RouterEvents
from kvclient.vllm.hbm import Holdings
from kvclient.vllm.keys import Keyer, Request
from kvclient.vllm.other_connectors import UncheckedLoads
from kvclient.vllm.pins import Pins, Pool
from kvclient.vllm.transfer_params import Said, TransferParams
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

log = logging.getLogger("vllm.kvserver.scheduler")

PAUSE_S = 0.002
"""Pause of an idle engine, once in each step, before it asks again for chunks that are coming."""
STORES_NO_MORE = (
    "nothing more is stored: another connector's load failed within a step, and this release of vLLM computes wrong KV"
    " after that with asynchronous scheduling or Model Runner V2"
)
ASKED_EACH_STEP = 4
"""Lookups per step for requests that are not matched yet. Each costs the step about 50 us."""


class Scheduled(NamedTuple):
    """A request that vLLM computes in this step."""

    name: str
    begin: int
    """Leading tokens that were computed or loaded before the step."""
    tokens: int
    """Leading tokens that are computed at the end of the step."""
    loads_within: bool = True
    """Whether another connector may load a request of this step within the step. True if vLLM does not say."""


class _Live:
    """A request that has begun and not finished."""

    def __init__(self, request: Request, extra: bytes | None, *, said: Said) -> None:
        self.request = request
        self.said = said
        self.extra = extra
        """Start of the request's key chain. None if the request has no keys."""
        self.chunks = 0
        """Number of chunks that have keys."""
        self.key = b""
        """Key of the last chunk that has one."""
        self.hbm_tokens = 0
        self.disk_tokens = 0
        """Tokens of the last retrieve that the server had on disk."""


class Scheduler:
    """One engine's scheduler half. Belongs to the scheduler's thread."""

    def __init__(
        self,
        client: Client,
        options: Options,
        keyer: Keyer,
        *,
        store_output: bool,
        steps_ahead: int = 0,
        workers_go_back: bool = True,
        recovers: bool = True,
        step_wait_s: float = 0.0,
        stores_over: Callable[[], Iterable[tuple[int, int]]] = tuple,
        events: RouterEvents | None = None,
        answers: Answers | None = None,
        transfer_params: TransferParams | None = None,
    ) -> None:
        """steps_ahead: how many more steps the engine schedules at most before one is over.

        workers_go_back, recovers: see UncheckedLoads.

        step_wait_s: how long a step with other work may wait for lookup answers, for all its requests together.

        stores_over: (job, rank) of ended stores whose ranks run in this process, before they are reported.

        events: what routers are told. None: nothing.

        answers: counts are told only in steps that it calls answered. None: in every step.

        transfer_params: what proxies say of requests. None: it is not for this connector.
        """
        self._transfer_params = transfer_params
        self._stores = options.stores
        self._answers = answers
        self._events = events
        self._stores_over = stores_over
        self._offload = Offload(options)
        self._exchange = LookupExchange(client, self._offload, log, witness=events)
        self._holdings = Holdings(options.groups)
        self._chunk_tokens = options.chunk_tokens
        block_tokens = max(group.block_tokens for group in options.groups)
        self._unchecked = UncheckedLoads(
            block_tokens, steps_ahead=steps_ahead, workers_go_back=workers_go_back, recovers=recovers
        )
        self._patience_s = options.lookup_deadline_s
        self._step_wait_s = self._step_wait_left_s = step_wait_s
        self._has_paused = False
        self._keyer = keyer
        self._store_output = store_output
        self._told: dict[str, int] = {}
        self._seconds: dict[str, list[float]] = {}
        """Durations of ranks' jobs that were not told yet."""
        self._ranks = options.ranks
        self._said: dict[int, bytes] = {}
        """Rank -> its namespace."""
        self._live: dict[str, _Live] = {}
        self._known_tokens: dict[str, int] = {}
        """Request -> leading tokens that the engine has or that we retrieve. Only matched requests that do not compute
        yet."""
        self._unnamed: dict[str, Naming] = {}
        """Requests whose keys are still being made. They have not begun in the Offload."""
        self._computing: set[str] = set()
        """Unfinished requests of the last step. Not empty means that the engine has work."""
        self.pins = Pins(options.ranks)
        self.untold: list[RetrieveOrder] = []
        """Retrieves that the engine waits for and that no rank has received yet."""

    def use_pool(self, pool: Pool) -> None:
        self.pins.use_pool(pool)
        self._holdings.use_pool(pool)
        if self._events is not None:
            self._events.use_pool(pool)

    def use_namespace(self, namespaces: set[bytes]) -> None:
        """Take the namespace that the ranks registered. Nothing is looked up or stored before this."""
        if len(namespaces) != 1:
            raise RequestError("namespace", f"the ranks say {len(namespaces)} namespaces; expected one")
        self._exchange.use_namespace(*namespaces)
        if self._events is not None:
            self._events.use_namespace(*namespaces)

    def learn(self, namespaces: Iterable[tuple[int, bytes]]) -> None:
        """Take the namespaces of single ranks, which may arrive in different steps. Used once all ranks have sent
        theirs."""
        for rank, namespace in namespaces:
            self._said[rank] = namespace
            if len(self._said) == self._ranks:
                self.use_namespace({*self._said.values(), *filter(None, [self._exchange.namespace])})

    # ---------------------------------------------------------------- requests

    def new(self, request: Request) -> None:
        """Begin a request. Idempotent, because match() calls it too, for releases that do not announce new requests."""
        name = request.request_id
        if name in self._live:
            return
        try:
            extra = self._keyer.extra(request)
            keys = self._keyer.begin(request, extra=extra)
        except RequestError as problem:
            self._leave_uncached(request, problem)
            return
        live = self._live[name] = _Live(request, extra, said=self._said_of(request))
        if isinstance(keys, bytes):
            self._begin(live, keys)
            if keys and (request.num_tokens < LONG_TOKENS or not self._keyer.takes_hashes):
                self._ask_now(name)  # otherwise match() or a later step asks: this call should not pay for all of it
        else:
            self._unnamed[name] = keys

    def match(self, request: Request, hbm_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that can be retrieved, and whether that happens between steps. (None, False): ask again."""
        self.new(request)
        if request.request_id in self._unnamed and not self._names_now(request.request_id):
            return None, False
        live = self._live[request.request_id]
        live.hbm_tokens = self._known_tokens[request.request_id] = hbm_tokens
        self._exchange.notice_a_loss()
        self._exchange.listen()
        self._exchange.send()  # the rest that the last call did not send
        self._unpin()
        tokens = self._match(request, hbm_tokens)
        if self._may_wait or not self._exchange.connected:
            self._exchange.send()  # otherwise the next match() or step() sends it
            if tokens is None:
                tokens = self._wait_and_match(request, hbm_tokens)
        return tokens, bool(tokens)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The request has its blocks. external_tokens: tokens to retrieve of those that match() returned, or 0."""
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
        self._unchecked.brought(_only_table(tables), begin=live.hbm_tokens, end=order.end_tokens)
        live.disk_tokens = order.disk_tokens
        self.untold.append(order)

    def disk_tokens(self, name: str) -> int:
        """Tokens of the request's current retrieve that the server had on disk. Valid after allocated()."""
        return self._live[name].disk_tokens if name in self._live else 0

    def finished(self, name: str, tables: Sequence[Sequence[int]] = ()) -> dict[str, Any] | None:
        """The request has finished or was aborted. tables: its block ids by group. Returns what a proxy passes on.

        Jobs in flight go on. vLLM keeps a retrieve's blocks until the worker reports the retrieve's end. A store's
        blocks are pinned, and so are the request's other blocks until its stores have ended.
        """
        self.pins.keep(name, tables)
        if self._answers is not None:
            self._answers.finished(name)
        self._computing.discard(name)
        if name not in self._live:
            return None
        side = self._live[name].said.side
        self._leave_unnamed(name)
        self._known_tokens.pop(name, None)
        self._unchecked.forget(name, said_tokens=self._live[name].request.num_tokens)
        del self._live[name]
        held_tokens, is_there = self._offload.held_tokens(name), self._offload.hands_over(name)
        self._offload.finish(name)
        self._exchange.pledge()  # an idle engine makes no step that would take its pledge back
        if self._transfer_params is None or side != "producer" or not self._stores:
            return None
        return self._transfer_params.answer(name, tables, held_tokens=held_tokens, is_there=is_there)

    def preempted(self, names: Iterable[str]) -> None:
        """These requests have lost their blocks in this step."""
        for name in names:
            self._offload.lost_blocks(name)

    # ---------------------------------------------------------------- steps

    def step(
        self, scheduled: Iterable[Scheduled], tables_of: Any
    ) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        """Return the retrieves and stores that the workers begin in this step. tables_of: a request's block ids by
        group."""
        self._exchange.listen()
        self._exchange.tidy()
        if self._unnamed:
            self._name_some()
        self._ask_ahead()
        items = list(scheduled)
        self._unchecked.begin_step()
        if self._known_tokens or self._unchecked:
            for item in items:
                self._notice(item, tables_of)
        is_doubtful = bool(self._unchecked)
        stores = []
        self._computing.clear()
        self._step_wait_left_s, self._has_paused = self._step_wait_s, False
        now_s = time.monotonic()
        for item in items:
            self._computing.add(item.name)
            if is_doubtful and self._is_held_back(item, tables_of):
                continue
            order = self._store(item, tables_of, now_s)
            if order is not None:
                stores.append(order)
        self._exchange.pledge()
        if self._answers is not None:
            self._answers.scheduled(self._live[item.name].request for item in items if item.name in self._live)
        retrieves = tuple(self.untold)
        self.untold.clear()
        self.pins.told()
        return retrieves, tuple(stores)

    def collect(self) -> None:
        """Take the answers that came between two steps, so that the next match() does not have to read them."""
        if len(self._exchange):
            self._exchange.listen()

    def take_events(self) -> list[Any]:
        """vLLM's events since the last call."""
        return self._events.take() if self._events is not None else []

    def failed(self, blocks: Iterable[int]) -> None:
        """Loads into these blocks failed, ours or another connector's."""
        if self._unchecked.failed(blocks):
            log.warning(STORES_NO_MORE)

    def ended(self, reports: Iterable[Report]) -> None:
        """Take the ranks' reports of ended jobs."""
        for report in reports:
            self.pins.reported(report.job, report.rank)
            is_retrieve = isinstance(report.result, RetrieveResult)
            self._seconds.setdefault("retrieve_seconds" if is_retrieve else "store_seconds", []).append(report.seconds)
            if isinstance(report.result, RetrieveResult):
                self._offload.retrieve_ended(report.job, report.rank, report.result, seconds=report.seconds)
            else:
                ended = self._offload.store_ended(report.job, report.rank, report.result, seconds=report.seconds)
                if self._events is not None and ended is not None and ended.chunks:
                    self._events.stored(ended.order.keys[: ended.chunks * KEY_BYTES][-KEY_BYTES:])
        self._exchange.tidy()

    def take_counts(self) -> dict[str, int | list[float]]:
        """Counts and durations that were not told yet, by name. Empty in a step whose statistics may get lost.

        See offload_values.Statistics, and Report for the durations."""
        if self._answers is not None and not self._answers.take():
            return {}
        now = dict(vars(self._offload.statistics))
        skipped = now.pop("skipped_tokens")
        counts = {name: value for name, value in now.items() if not name.endswith("_in_flight")}
        counts |= {f"skipped_tokens:{why}": tokens for why, tokens in skipped.items()}
        told, self._told = self._told, counts
        seconds, self._seconds = self._seconds, {}
        return {name: grown for name, value in counts.items() if (grown := value - told.get(name, 0))} | seconds

    def busy(self) -> bool:
        """Whether an idle engine has to keep stepping so that job ends are delivered."""
        is_untold = self._events is not None and self._events.pending
        return self._offload.busy() or len(self._exchange) > 0 or is_untold

    def reset(self) -> None:
        """Forget all keys, because the engine's weights may have changed. Nothing stored before is found again."""
        self._keyer.reset()
        if self._events is not None:
            self._events.reset()
        for name, live in list(self._live.items()):
            self._leave_unnamed(name)
            self._offload.finish(name)
            del self._live[name]
            if live.request.num_computed_tokens:
                self._begin_unkeyed(live.request, "reset")
            else:
                self.new(live.request)
        self._unpin()  # vLLM refuses to reset its cache while blocks are held, and tries again later

    def give_up(self) -> None:
        """After a bug, no rank gets another order, and nothing is fetched any more."""
        self.pins.drop_untold()
        if self._events is not None:
            self._events.reset()

    def close(self) -> None:
        self._exchange.close()
        if self._events is not None:
            self._events.close()

    # ---------------------------------------------------------------- helpers

    def _begin(self, live: _Live, keys: bytes) -> None:
        self._add_keys(live, keys)
        self._offload.begin(
            live.request.request_id,
            tokens=live.request.num_prompt_tokens,
            keys=keys,
            reads=not getattr(live.request, "skip_reading_prefix_cache", False),
            side=live.said.side,
            handed_tokens=live.said.tokens,
        )

    def _settle(self, name: str) -> None:
        """Give the request its keys. Waiting for the background thread takes no longer than hashing here."""
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
        """Whether the request has its keys. A step with other work does one piece of the work, and waits if it may."""
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
        """Do a piece of the oldest unnamed request in each step, so that unmatched requests get keys too."""
        next(iter(self._unnamed.values())).go_on()
        for name in [name for name, naming in self._unnamed.items() if naming.ready]:
            self._settle(name)

    def _leave_unnamed(self, name: str) -> None:
        """Stop making keys for a request that no longer needs them."""
        if self._unnamed.pop(name, None) is not None:
            self._begin(self._live[name], b"")

    def _leave_uncached(self, request: Request, problem: RequestError) -> None:
        log.debug("request not cached request=%s %s", request.request_id, problem)
        self._begin_unkeyed(request, problem.code)

    def _begin_unkeyed(self, request: Request, why: str) -> None:
        self._live[request.request_id] = _Live(request, None, said=self._said_of(request))
        self._offload.begin_unkeyed(request.request_id, tokens=request.num_prompt_tokens, why=why)

    def _said_of(self, request: Request) -> Said:
        return self._transfer_params.said_of(request) if self._transfer_params is not None else Said()

    def _unpin(self) -> None:
        """Unpin blocks of ended stores whose reports are not delivered yet.

        Reports arrive with steps. An engine that makes no step would see its pool full of pinned blocks and would need
        an empty step to free them.
        """
        if len(self.pins):
            for job, rank in self._stores_over():
                self.pins.reported(job, rank)

    def _match(self, request: Request, hbm_tokens: int) -> int | None:
        return self._offload.match(
            request.request_id, tokens=request.num_tokens, hbm_tokens=hbm_tokens, now_s=time.monotonic()
        )

    def _wait_and_match(self, request: Request, hbm_tokens: int) -> int | None:
        """Call match() again if the answer has arrived. An engine with no other work waits for the answer.

        Nobody waits for the answer of a request that waits for more anyway: there may be hundreds of them.
        """
        tokens, awaits_more = None, self._offload.awaits_more(request.request_id, time.monotonic())
        while tokens is None and not awaits_more and self._offload.is_asking(request.request_id):
            if not (self._waits(self._exchange.wait) if self._computing else self._exchange.wait(self._patience_s)):
                break
            tokens = self._match(request, hbm_tokens)
            self._exchange.send()
        is_idle = tokens is None and not self._computing and not self._has_paused
        if is_idle and self._offload.awaits_more(request.request_id, time.monotonic()):
            self._has_paused = True
            time.sleep(PAUSE_S)  # an engine without work would ask again at once
        return tokens

    @property
    def _may_wait(self) -> bool:
        """Whether the engine has no other work, or the step has wait time left."""
        return not self._computing or self._step_wait_left_s > 0

    def _waits(self, wait: Callable[[float], bool]) -> bool:
        """Call `wait` with the wait time that the step has left. Returns whether the awaited thing happened."""
        if self._step_wait_left_s <= 0:
            return wait(0.0)
        began_s = time.monotonic()
        is_over = wait(self._step_wait_left_s)
        self._step_wait_left_s -= time.monotonic() - began_s
        return is_over

    def _ask_now(self, name: str) -> None:
        """Look up a new request at once. If too many lookups run ahead already, a later step does it."""
        if self._offload.next_to_ask() is not None:
            self._ask(name)
            self._exchange.send()

    def _ask_ahead(self) -> None:
        for _ in range(ASKED_EACH_STEP):
            if (name := self._offload.next_to_ask()) is None:
                break
            self._ask(str(name))
        self._exchange.send()

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
            # The retrieve between steps did not fail.
            self._unchecked.brought(_only_table(tables_of(item.name)), begin=known, end=item.begin)
            known = item.begin
        live = self._live.get(item.name)
        if live is None or (known is None and not self._unchecked):
            return
        self._unchecked.notice(
            item.name,
            _only_table(tables_of(item.name)),
            begin=item.begin,
            end=item.tokens,
            known=known,
            said_tokens=live.request.num_tokens,
        )

    def _is_held_back(self, item: Scheduled, tables_of: Any) -> bool:
        """Whether another connector's load forbids storing this request now."""
        live = self._live.get(item.name)
        return live is None or self._unchecked.holds_back(
            item.name,
            _only_table(tables_of(item.name)),
            begin=item.begin,
            end=item.tokens,
            said_tokens=live.request.num_tokens,
        )

    def _more_keys(self, live: _Live) -> bytes:
        """Keys of the chunks that have none yet."""
        assert live.extra is not None
        keys = self._keyer.keys(live.request, extra=live.extra, parent=live.key, first_chunk=live.chunks)
        self._add_keys(live, keys)
        return keys

    def _add_keys(self, live: _Live, keys: bytes) -> None:
        if self._events is not None:
            self._events.saw(live.request, first_chunk=live.chunks, parent=live.key, keys=keys)
        live.chunks += len(keys) // KEY_BYTES
        live.key = keys[-KEY_BYTES:] or live.key


def _only_table(tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """The single block table; `()` for models with several groups, whose blocks UncheckedLoads does not track."""
    return tables[0] if len(tables) == 1 else ()

"""An engine that tells a router in vLLM's words what the server holds: the router must believe just that.

The connector's real code follows the service's events over ways that lose messages, and a router's decoder reads the
bytes. The seed's other randomness is not touched.
"""

from collections import Counter, deque
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvclient.offload.announced import Announced
from kvclient.offload.values import Group
from kvclient.transport.event_stream import EventStream
from kvclient.vllm.events import Kind, RouterEvents, Words
from kvserver.brain.replay_log import Replays, Sent, packed
from kvserver.wire.kv_events import REPLAY_END, TOPIC, Batch, ChunksStored, KvEvent, Missed, decode_batch, encode_batch
from kvserver.wire.messages import KEY_BYTES, Found, Lookup
from tests.rigs import router_decoders
from tests.rigs.router_decoders import Seen
from tests.rigs.router_index import Index
from tests.rigs.vllm_events import RELEASES, Utils, block_hashes, encoded, events_of

from .content import Path, is_chain, key_of, keys_of, path_of
from .memory import Wrong
from .subscriber import Fact

if TYPE_CHECKING:
    from .processes import Process
    from .shapes import Shape

CALL_S = 0.00005
"""Time that passes with each look at the clock, so that a step's time is up in some steps."""
QUEUED_MAX, AHEAD_MAX = 7, 3
"""Messages on their way; of a replay."""
ENOUGH = 1000
"""Chunks of a table that is not too small."""
STEPS_MAX = 20_000
"""Steps until a router must know everything."""
TIERS = {"cpu": "dram", "storage": "disk", "host-pinned": "dram", "disk": "disk"}


class Ways:
    """The publisher's sockets and the engine's, with messages between them."""

    def __init__(self, rng: Random, counts: "Counter[str]", *, queued_max: int = QUEUED_MAX, kept: int = 0) -> None:
        """kept: batches that the server keeps; 0: the seed decides."""
        self._rng = rng
        self._counts = counts
        self._queued_max = queued_max
        self.loss = rng.choice((0.0, 0.0, 0.05, 0.3)) if not kept else 0.01
        self._kept = kept or rng.choice((2, 9, 100_000))
        self.is_calm = False
        self.is_incomplete = False
        """Batches of this brain's life are lost for good."""
        self._published: deque[list[bytes]] = deque()
        self._replayed: deque[list[bytes]] = deque()
        self._reader = 0
        self._brain = 0
        self._sequence = 0
        self._replays = Replays(0, self._send)

    def publish(self, brain: int, events: list[KvEvent]) -> None:
        if brain != self._brain:
            self._brain, self._sequence, self.is_incomplete = brain, 0, False
            self._replays = Replays(brain, self._send, batches_max=self._kept)
        self._sequence += 1
        payload = encode_batch(Batch(0.0, events, brain))
        self._replays.keep(self._sequence, payload)
        self._put(payload)

    def show_life(self) -> bool:
        """Publishes a sign of life. Returns whether it arrives."""
        return bool(self._brain) and self._put(encode_batch(Batch(0.0, [], self._brain)))

    def _put(self, payload: bytes) -> bool:
        if len(self._published) >= self._queued_max or (not self.is_calm and self._rng.random() < self.loss):
            self._counts["router: messages lost"] += 1
            return False
        self._published.append([TOPIC, packed(self._sequence), payload])
        return True

    def _send(self, reader: bytes, sequence: bytes, payload: bytes) -> Sent:
        if int.from_bytes(reader, "big") != self._reader:
            return Sent.GONE
        if len(self._replayed) >= AHEAD_MAX:
            return Sent.LATER
        if payload and any(isinstance(event, Missed) for event in decode_batch(payload).events):
            self.is_incomplete = True
            self._counts["router: batches lost for good"] += 1
        self._counts["router: replays"] += sequence == REPLAY_END
        self._replayed.append([b"", sequence, payload])
        return Sent.YES

    # ---------------------------------------------------------------- the engine's side

    def published(self) -> list[bytes] | None:
        return self._published.popleft() if self._published else None

    def replayed(self) -> list[bytes] | None:
        self._replays.turn()
        return self._replayed.popleft() if self._replayed else None

    @property
    def has_mail(self) -> bool:
        return bool(self._published or self._replayed)

    def ask(self, first: int) -> bool:
        if not self._brain or (not self.is_calm and self._rng.random() < self.loss):
            return self._rng.random() < 0.5  # the question is lost, or could not even be sent
        self._replays.ask(packed(self._reader), first)
        return True

    def drop_replayed(self) -> None:
        self._reader += 1
        self._replayed.clear()

    def close(self) -> None:
        pass


class Router:
    """One engine's announcements and a router's index of them. Both outlive brains."""

    def __init__(
        self,
        seed: int,
        shapes: "dict[bytes, Shape]",
        counts: "Counter[str]",
        *,
        depth: int,
        fanout: int,
        is_large: bool = False,
    ) -> None:
        """shapes: of the namespaces in which engines store. is_large: no table or queue is small."""
        self._rng = rng = Random(f"router {seed}")
        self._counts = counts
        self._size = depth, fanout
        self._digest = rng.choice(list(shapes))
        shape = shapes[self._digest]
        self._chunk_tokens = shape.chunk_tokens
        groups = [Group(group.block_tokens, group.kind, group.window_tokens) for group in shape.groups]
        self._kv_events = events_of(rng.choice(RELEASES))
        kinds = [Kind("full_attention" if group.kind == "full" else "mamba", None) for group in groups]
        self._words = Words(self._kv_events, Utils(), groups, kinds)
        self._is_dynamo = rng.random() < 0.5
        self._hash_tokens = rng.choice((1, self._words.block_tokens or 1))
        self._pool = SimpleNamespace(hash_block_size=self._hash_tokens, cached_block_hash_to_block=object())
        self._now_s = 0.0
        self.ways = Ways(rng, counts, queued_max=1000, kept=10_000) if is_large else Ways(rng, counts)
        self._stream = EventStream(self.ways, self._clock)
        chunks_max, self._held_max = rng.choice((1, 5, ENOUGH, ENOUGH)), rng.choice((0, 3, ENOUGH, ENOUGH))
        if is_large:
            chunks_max = self._held_max = 1 << 20
        self._announced = Announced(chunks_max=chunks_max, held_max=self._held_max)
        self._events = RouterEvents(
            self._stream, self._words, self._announced, chunk_tokens=self._chunk_tokens, now=self._clock
        )
        self._events.use_pool(self._pool)
        self._events.use_namespace(self._digest)
        self._index = Index()
        self._cleared: list[Any] = []
        """vLLM's own events of the next step."""
        self._paths: set[Path] = set()
        """Chunks that the engine has seen."""
        self._known_hashes: dict[Path, list[bytes]] = {}
        self._speaks = False
        self._asked: dict[tuple[Process, int], int] = {}
        """Lookups without an answer."""

    # ---------------------------------------------------------------- what happens

    def told(self, brain: int, events: list[KvEvent]) -> None:
        """The service tells subscribers something."""
        self._speaks = True
        for event in events:
            if isinstance(event, ChunksStored) and event.namespace == self._digest and self._rng.random() < 0.7:
                self.sees(path_of(event.keys[-1]))
        self.ways.publish(brain, events)
        self.act()

    def asks(self, asker: "Process", number: int) -> None:
        """Some process looks up, as an engine's scheduler would."""
        self._asked[asker, number] = self._events.asked()

    def finds(self, asker: "Process", request: Lookup, reply: Found) -> None:
        """A lookup's answer has arrived, however late. Engines ask for their own prompts. Keys of two prompts, which
        other processes ask for, would show nothing: only the last of them is known to be there."""
        asked = self._asked.pop((asker, request.id), None)
        found = [request.keys[at : at + KEY_BYTES] for at in range(0, reply.chunks * KEY_BYTES, KEY_BYTES)]
        is_own = request.namespace == self._digest and bool(found) and is_chain(found)
        if asked is not None and is_own and not reply.chunks_on_disk:
            self._counts["router: lookups that show what is held"] += 1
            self._events.found(b"".join(found), asked)

    def act(self) -> None:
        """The engine does something, or nothing."""
        rng = self._rng
        if rng.random() < 0.3:
            self.sees(tuple(int(rng.random() * self._size[1]) for _ in range(1 + int(rng.random() * self._size[0]))))
        if rng.random() < 0.02:
            self.ways.show_life()
        if rng.random() < 0.01:
            self._now_s += rng.choice((1.0, 6.0, 60.0))
        if rng.random() < 0.005:  # vLLM gives its own cache up, for which routers forget all tiers
            self._pool.cached_block_hash_to_block = object()
            self._cleared = [self._kv_events.AllBlocksCleared()]
            self._counts["router: vLLM cleared its own cache"] += 1
        if rng.random() < 0.003:
            self._events.reset()
        if rng.random() < 0.4:
            self._step()

    def sees(self, path: Path) -> None:
        """A prompt comes to the engine."""
        chunks = [path[: depth + 1] for depth in range(len(path))]
        request: Any = SimpleNamespace(
            all_token_ids=[token for chunk in chunks for token in self._tokens(chunk)],
            block_hashes=[block for chunk in chunks for block in self._hashes(chunk)],
            lora_request=None,
            cache_salt=None,
        )
        self._paths.update(chunks)
        first = int(self._rng.random() * len(path)) if self._rng.random() < 0.2 else 0
        parent = key_of(path[:first])
        self._events.saw(request, first_chunk=first, parent=parent, keys=b"".join(keys_of(path, first)))

    def _hashes(self, path: Path) -> list[bytes]:
        """vLLM's hashes of a chunk."""
        known = self._known_hashes.get(path)
        if known is None:
            parent = self._hashes(path[:-1])[-1] if len(path) > 1 else b""
            known = self._known_hashes[path] = block_hashes(self._tokens(path), self._hash_tokens, parent)
        return known

    def _tokens(self, path: Path) -> list[int]:
        """Chunks of one parent begin with the same tokens, so that they may have blocks in common."""
        common = self._chunk_tokens // 2
        return [len(path)] * common + [100 + path[-1]] * (self._chunk_tokens - common)

    def _step(self) -> None:
        told = self._cleared + self._events.take()
        self._cleared = []
        if told:
            self._counts["router: events"] += len(told)
            self._index.take(self._decoded(encoded(self._kv_events, told)))

    def _decoded(self, payload: bytes) -> list[Seen]:
        if self._is_dynamo:
            return router_decoders.dynamo(payload, block_size=self._words.block_tokens)
        return router_decoders.llm_d(payload)

    def _clock(self) -> float:
        self._now_s += CALL_S
        return self._now_s

    # ---------------------------------------------------------------- what must be so

    def check(self, held: set[Fact], untold: set[tuple[bytes, bytes]]) -> None:
        """Lets the engine catch up, and compares the router's index with the service.

        Batches that are lost for good, and too small tables, may cost knowledge. They never leave a wrong belief.
        """
        if not self._speaks or not self._words.block_tokens:
            return
        self._catch_up()
        known = {(TIERS[tier], block) for block, tier in self._index.blocks}
        self._counts["router: blocks that it knows"] += len(known)
        tiers: dict[bytes, set[str]] = {}
        for digest, key, tier in held:
            if digest == self._digest:
                tiers.setdefault(key, set()).add(tier)
        if wrong := known - self._blocks(tiers):
            raise Wrong(f"the router believes in {sorted(wrong)[0]}")
        if self.ways.is_incomplete or self._held_max < ENOUGH:
            return
        best = {key: {"dram"} if "dram" in found else found for key, found in tiers.items()}
        told = {key: found for key, found in best.items() if (self._digest, key) not in untold}
        if missing := self._blocks(told) - known:
            raise Wrong(f"the router was not told of {sorted(missing)[0]}")
        if told == best and known != self._blocks(best):
            raise Wrong(f"the router was told of another tier: {sorted(known - self._blocks(best))[0]}")

    def _catch_up(self) -> None:
        self.ways.is_calm = True
        heard = 0
        for _ in range(STEPS_MAX):
            heard += self.ways.show_life()
            for _ in range(QUEUED_MAX):
                self._step()
                self._now_s += 0.2
            if heard > 2 and not self.ways.has_mail and self._stream.is_followed and not self._events.pending:
                self.ways.is_calm = False
                return
        raise Wrong("the router does not catch up")

    def _blocks(self, tiers: dict[bytes, set[str]]) -> set[tuple[str, int]]:
        """(tier, block) of the chunks that this engine can fetch and knows, of those in these tiers."""
        found: set[tuple[str, int]] = set()
        scale = self._words.block_tokens // self._hash_tokens
        for path in self._paths:
            chain = keys_of(path)
            if all(key in tiers and self._announced.knows(key) for key in chain):
                for block in self._hashes(path)[scale - 1 :: scale]:
                    found |= {(tier, int.from_bytes(block[-8:], "big")) for tier in tiers[chain[-1]]}
        return found

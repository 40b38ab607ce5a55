"""vLLM's KV events about the server's chunks, so that routers that read vLLM's events see this tier.

The scheduler half hands over what it names, the server's events say what is held, and offload/announced.py decides what
is told. This file gives it vLLM's words. Everything happens in take(), which vLLM calls once in each step. It takes
about a millisecond at most, waits for nobody, and leaves the rest to later steps.
"""

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvclient.offload.announced import Announced, Removed, Stored, Told
from kvclient.offload.guard import Guard
from kvclient.offload.values import Group
from kvclient.transport.event_stream import EventStream
from kvclient.vllm.keys import Request
from kvserver.wire.kv_events import Tier
from kvserver.wire.messages import KEY_BYTES

log = logging.getLogger("vllm.kvserver.events")

TOKENS_MAX = 8 << 20
"""Most tokens whose chunks are known. A token costs the scheduler's process about 30 bytes."""
READ_S, LEARN_S = 0.0003, 0.0003
"""Time in each step for the server's events, and for chunks that were seen."""
TOKENS_PER_STEP, CHUNKS_PER_STEP = 8_192, 128
"""Most that is told in a step."""
SEEN_MAX = 1024
"""Requests whose chunks are still to be learnt. Further ones are not told."""
TOLD_WITHIN_S = 0.25
"""How long an engine without other work waits for the server to say that a store has ended."""

MEDIUM: dict[Tier, str] = {"dram": "CPU", "disk": "STORAGE"}


class _Content(NamedTuple):
    """The content of a chunk, besides its hashes."""

    tokens: "array[int]"
    lora: tuple[int | None, str | None]
    extra: list[Any] | None
    """vLLM's extra keys of each block. None if no block has any."""


class _Seen:
    """Chunks of a request that are still to be learnt."""

    def __init__(self, request: Request, first_chunk: int, parent: bytes, keys: bytes) -> None:
        self.request = request
        self.first_chunk = first_chunk
        self.parent = parent
        self.keys = keys
        self.done = 0


class Kind(NamedTuple):
    """A group as vLLM's events describe it."""

    name: str | None
    window: int | None


class Words:
    """vLLM's event classes and block hashes, in the release at hand. Fields that a release has not are left out."""

    def __init__(self, kv_events: Any, kv_cache_utils: Any, groups: Sequence[Group], kinds: Sequence[Kind]) -> None:
        """kv_events, kv_cache_utils: vLLM's modules."""
        full = [place for place, group in enumerate(groups) if group.kind == "full"]
        self.block_tokens = groups[full[0]].block_tokens if full else 0
        """0: no group needs every token, and nothing is told."""
        self._groups = [(place, kinds[place]) for place in full if groups[place].block_tokens == self.block_tokens]
        self._stored, self._removed = kv_events.BlockStored, kv_events.BlockRemoved
        self._stored_fields = frozenset(self._stored.__struct_fields__)
        self._removed_fields = frozenset(self._removed.__struct_fields__)
        self._utils = kv_cache_utils
        self._external = kv_cache_utils.maybe_convert_block_hash
        self._event_extra = getattr(kv_cache_utils, "to_event_extra_keys", list)

    def blocks(self, request: Request, first_token: int, end_token: int, *, hash_tokens: int) -> list[Any]:
        """vLLM's external hashes of a request's blocks. Empty if it has not made them."""
        hashes = request.block_hashes[first_token // hash_tokens : end_token // hash_tokens]
        if len(hashes) != (end_token - first_token) // hash_tokens:
            return []
        if self.block_tokens != hash_tokens:
            merged = self._utils.BlockHashListWithBlockSize(hashes, hash_tokens, self.block_tokens)
            hashes = [merged[place] for place in range(len(merged))]
        return list(map(self._external, hashes))

    def content(self, request: Any, first_token: int, end_token: int) -> _Content:
        tokens = array("I", request.all_token_ids[first_token:end_token])
        lora = request.lora_request
        has_extra = lora is not None or any(
            getattr(request, name, None) for name in ("mm_features", "cache_salt", "prompt_embeds_per_block_hashes")
        )
        has_extra = has_extra or getattr(request, "prompt_embeds", None) is not None
        extra = None
        if has_extra:
            starts = range(first_token, end_token, self.block_tokens)
            made = self._utils.generate_block_hash_extra_keys
            extra = [made(request, start, start + self.block_tokens, 0)[0] for start in starts]
        return _Content(tokens, (lora.lora_int_id, lora.lora_name) if lora is not None else (None, None), extra)

    def stored(self, run: list[Stored]) -> Iterator[Any]:
        """Events of chunks that follow each other, for each group."""
        head = run[0]
        before = head.chunk.parent.blocks[-1] if head.chunk.parent is not None else None
        skipped = head.first * self.block_tokens
        blocks: list[Any] = []
        tokens: list[int] = []
        extra: list[Any] = []
        for _, chunk, _ in run:
            blocks += chunk.blocks
            tokens += chunk.content.tokens
            extra += chunk.content.extra or [None] * len(chunk.blocks)
        lora_id, lora_name = head.chunk.content.lora
        for place, kind in self._groups:
            fields = {
                "block_hashes": blocks[head.first :],
                "parent_block_hash": blocks[head.first - 1] if head.first else before,
                "token_ids": tokens[skipped:],
                "block_size": self.block_tokens,
                "lora_id": lora_id,
                "medium": MEDIUM[head.tier],
                "lora_name": lora_name,
                "extra_keys": self._event_extra(extra[head.first :]),
                "group_idx": place,
                "kv_cache_spec_kind": kind.name,
                "kv_cache_spec_sliding_window": kind.window,
            }
            yield self._stored(**{name: value for name, value in fields.items() if name in self._stored_fields})

    def removed(self, told: Removed) -> Iterator[Any]:
        for place, _ in self._groups:
            fields = {"block_hashes": list(told.blocks), "medium": MEDIUM[told.tier], "group_idx": place}
            yield self._removed(**{name: value for name, value in fields.items() if name in self._removed_fields})


class RouterEvents:
    """The events of one engine. Belongs to the scheduler's thread. After a bug it tells nothing more."""

    def __init__(
        self,
        stream: EventStream,
        words: Words,
        announced: Announced,
        *,
        chunk_tokens: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._words = words
        self._chunk_tokens = chunk_tokens
        self._announced = announced
        self._now = now
        self._chunks_per_step = min(CHUNKS_PER_STEP, max(1, TOKENS_PER_STEP // chunk_tokens))
        self._seen: deque[_Seen] = deque()
        self._namespace = b""
        self._pool: Any = None
        self._cache: object = None
        """vLLM's table of its own blocks. Another one: vLLM has told routers that this engine has nothing any more."""
        self._awaited: dict[bytes, float] = {}
        """Key of a chunk that was stored -> until when the engine waits for the server to say so."""
        self._guard = Guard(log, outcome="routers are told nothing more of the server's chunks")

    def use_pool(self, pool: Any) -> None:
        """Use vLLM's BlockPool. Only read, never changed."""
        self._pool, self._cache = pool, getattr(pool, "cached_block_hash_to_block", None)

    def use_namespace(self, namespace: bytes) -> None:
        if namespace != self._namespace:
            self._namespace = namespace
            self._announced.follow(namespace)

    def saw(self, request: Request, *, first_chunk: int, parent: bytes, keys: bytes) -> None:
        """The request has chunks with these keys, from first_chunk on. parent: the key before them."""
        if keys and len(self._seen) < SEEN_MAX and not self._guard.tripped:
            self._seen.append(_Seen(request, first_chunk, parent, keys))

    def stored(self, last_key: bytes) -> None:
        """The ranks have stored a chunk, and the server is about to say so."""
        if self._stream.is_followed and not self._guard.tripped:
            self._awaited[last_key] = self._now() + TOLD_WITHIN_S

    def asked(self) -> int:
        return self._announced.now

    def found(self, keys: bytes, asked: int) -> None:
        """As Witness. An engine that comes late learns so what was stored long ago."""
        if self._stream.is_followed:
            self._announced.found(_split(keys), asked)

    def reset(self) -> None:
        """No chunk that was seen can be fetched any more."""
        self._seen.clear()
        self._announced.forget()

    @property
    def pending(self) -> bool:
        """Whether an engine without other work should take a step, so that routers are told."""
        if self._guard.tripped:
            return False
        now_s = self._now()
        for key, until_s in list(self._awaited.items()):
            if now_s > until_s or self._announced.is_told(key):
                del self._awaited[key]
        return bool(self._awaited or self._seen or self._announced.pending)

    def take(self) -> list[Any]:
        """vLLM's events since the last call."""
        if self._guard.tripped or not self._namespace or not self._words.block_tokens:
            self._seen.clear()
            return []
        return self._guard.run(self._take) or []

    def close(self) -> None:
        self._stream.close()

    def _take(self) -> list[Any]:
        self._announced.server_said(self._stream.take(until_s=self._now() + READ_S))
        self._learn()
        cache = getattr(self._pool, "cached_block_hash_to_block", None)
        if cache is not self._cache:
            self._cache = cache
            self._announced.cleared()
        return list(self._events(self._announced.take(self._chunks_per_step)))

    def _learn(self) -> None:
        until_s = self._now() + LEARN_S
        while self._seen:
            if self._learn_one(self._seen[0]):
                seen = self._seen.popleft()
                if seen.first_chunk == 0:
                    self._announced.seen(_split(seen.keys))
            if self._now() >= until_s:
                break

    def _learn_one(self, seen: _Seen) -> bool:
        """Learn the next chunk. Returns whether none is left."""
        start = seen.done * KEY_BYTES
        key = seen.keys[start : start + KEY_BYTES]
        if not self._announced.knows(key):
            first = (seen.first_chunk + seen.done) * self._chunk_tokens
            end, hash_tokens = first + self._chunk_tokens, getattr(self._pool, "hash_block_size", 0)
            blocks = self._words.blocks(seen.request, first, end, hash_tokens=hash_tokens) if hash_tokens else []
            if not blocks:
                return True
            if not self._announced.learn(key, seen.parent, blocks, self._words.content(seen.request, first, end)):
                return True
        seen.parent = key
        seen.done += 1
        return seen.done * KEY_BYTES >= len(seen.keys)

    def _events(self, told: Iterable[Told]) -> Iterator[Any]:
        run: list[Stored] = []
        for item in told:
            if run and not (isinstance(item, Stored) and _follows(run[-1], item)):
                yield from self._words.stored(run)
                run = []
            if isinstance(item, Stored):
                run.append(item)
            else:
                yield from self._words.removed(item)
        if run:
            yield from self._words.stored(run)


def _follows(before: Stored, after: Stored) -> bool:
    """Whether one event can tell of both."""
    is_next: bool = after.chunk.parent is before.chunk and after.first == 0 and after.tier == before.tier
    return is_next and after.chunk.content.lora == before.chunk.content.lora


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))


def kinds_of(kv_config: Any, interface: Any) -> list[Kind]:
    """interface: vllm.v1.kv_cache_interface. Releases before 0.22 say nothing about groups."""
    if not hasattr(interface, "get_kv_cache_spec_kind"):
        return [Kind(None, None) for _ in kv_config.kv_cache_groups]
    window = interface.get_kv_cache_spec_sliding_window
    specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
    return [Kind(interface.get_kv_cache_spec_kind(spec).value, window(spec)) for spec in specs]

"""Output tokens whose KV ATOM never computed, or computed from another request's state, although it publishes them.

A sequence preempted with output is recomputed in chunks. ATOM (ffdf3bb) takes a chunk that ends at or after the end of
the prompt for the last one. The output after it gets no KV, and later tokens attend to this gap. One request's output
is part of the next request's prompt, so such blocks would be stored as if complete, and would outlive the engine.

A request whose state ATOM gave away while it waited goes on with another one (scheduler.py finds it). From there on its
KV is as bad as missing.

So tokens that HBM provides are stored only up to the first token of a gap, and nothing computed after a gap is stored.

Such prompts are recognized by their tokens. If HBM holds another, complete block for the same tokens, this cannot be
seen. So less is stored than possible.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from kvclient.atom.steps import Seq
from kvclient.keys import chunk_keys
from kvserver.wire.messages import KEY_BYTES

log = logging.getLogger("atom.kvserver")

GAPS_MAX = 1024
"""Gaps that are remembered. The gap that no prompt has met for the longest time is forgotten first. HBM has most likely
reused its blocks by then."""


@dataclass
class _Resumed:
    seq: Seq
    """Reference that keeps its id() from being reused."""
    tokens: int
    """Tokens that ATOM has to compute before the next new one."""
    hbm_tokens: int


class Gaps:
    """The gaps of one engine.

    Call look() before another sequence is admitted, which may find what ATOM published, and before a sequence loses its
    blocks. Until then num_cached_tokens stays where the prefill ended.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._resumed: dict[int, _Resumed] = {}
        """id() -> preempted sequence whose prefill may still be running."""
        self._known: OrderedDict[bytes, list[list[int]]] = OrderedDict()
        """Key of the last whole chunk before a gap -> token lists from there up to the first missing token."""

    def allocated(self, seq: Seq) -> None:
        """The sequence has its blocks; its num_cached_tokens are the tokens that HBM has."""
        self._resumed.pop(id(seq), None)
        if seq.num_tokens > seq.num_prompt_tokens:
            self._resumed[id(seq)] = _Resumed(seq, seq.num_tokens, seq.num_cached_tokens)

    def look(self) -> None:
        """Check which prefills ATOM has finished, and note those that ended too early."""
        for key, resumed in list(self._resumed.items()):
            seq = resumed.seq
            if seq.num_cached_tokens >= seq.num_prompt_tokens and seq.num_cached_tokens > resumed.hbm_tokens:
                del self._resumed[key]
                if seq.num_cached_tokens < resumed.tokens:
                    first = seq.num_cached_tokens
                    self._note(seq, first)
                    log.warning(
                        "output without KV request=%s first_token=%d tokens=%d", seq.id, first, resumed.tokens - first
                    )

    def distrust(self, seq: Seq, first: int) -> None:
        """From this token on the sequence may be computed from another request's state."""
        self._note(seq, first)
        log.warning("state given away request=%s first_token=%d", seq.id, first)

    def forget(self, seq: Seq) -> None:
        """Drop a sequence that ATOM has ended."""
        self._resumed.pop(id(seq), None)

    def whole_tokens(self, seq: Seq) -> int:
        """Leading tokens of the prompt that may be stored: all, or those before a gap in the part from HBM."""
        if not self._known:
            return seq.num_prompt_tokens
        hbm_tokens = min(seq.num_cached_tokens, seq.num_prompt_tokens)
        keys = chunk_keys(seq.token_ids[:hbm_tokens], self._chunk_tokens)
        for chunk in range(len(keys) // KEY_BYTES + 1):
            before = keys[max(0, chunk - 1) * KEY_BYTES : chunk * KEY_BYTES]
            begin = chunk * self._chunk_tokens
            for missing in self._known.get(before, ()):
                if list(seq.token_ids[begin : min(begin + len(missing), hbm_tokens)]) == missing:
                    self._known.move_to_end(before)
                    return begin  # only whole chunks are stored
        return seq.num_prompt_tokens

    def _note(self, seq: Seq, first: int) -> None:
        begin = first // self._chunk_tokens * self._chunk_tokens
        before = chunk_keys(seq.token_ids[:begin], self._chunk_tokens)[-KEY_BYTES:]
        missing = list(seq.token_ids[begin : first + 1])
        known = self._known.setdefault(before, [])
        if missing not in known:
            known.append(missing)
        self._known.move_to_end(before)
        while sum(map(len, self._known.values())) > GAPS_MAX:
            self._known.popitem(last=False)

"""KV of output that ATOM never computed, and publishes in its prefix index all the same.

A sequence that was preempted with output is computed anew in chunks. ATOM (ffdf3bb) takes one that ends at or behind
the end of the prompt for the last; the output behind it gets no KV, and what follows attends to the gap. As the output
of one request is a part of the next one's prompt, such blocks would be stored as if they were whole, and outlive the
engine. What HBM brings of a prompt is stored only up to the first token of a gap, and of what is computed behind it
nothing.

Which prompts these are is told by their tokens: that the block which HBM has of them is another one, computed whole,
cannot be seen. So less is stored than could be.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass

from kvclient.atom_steps import Seq
from kvclient.keys import chunk_keys
from kvserver.wire.messages import KEY_BYTES

log = logging.getLogger("atom.kvserver")

GAPS_MAX = 1024
"""That are remembered. One goes that no prompt has met for the longest time; HBM has used its blocks for others since,
most likely."""


@dataclass
class _Resumed:
    seq: Seq
    """Held, so that its id() belongs to nobody else meanwhile."""
    tokens: int
    """All that ATOM has to compute before the next one."""
    hbm_tokens: int


class Gaps:
    """Of one engine. Look before another sequence is admitted, which may find what ATOM has published, and before one
    loses its blocks: until then num_cached_tokens stays where the prefill ended."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._resumed: dict[int, _Resumed] = {}
        """Preempted sequences whose prefill may still be under way, by id()."""
        self._known: OrderedDict[bytes, list[list[int]]] = OrderedDict()
        """By the key of the last whole chunk before a gap: the tokens from there up to the first that is missing."""

    def allocated(self, seq: Seq) -> None:
        """It has its blocks, and num_cached_tokens are those that HBM has."""
        self._resumed.pop(id(seq), None)
        if seq.num_tokens > seq.num_prompt_tokens:
            self._resumed[id(seq)] = _Resumed(seq, seq.num_tokens, seq.num_cached_tokens)

    def look(self) -> None:
        """Whether prefills are over by ATOM's word, and where they ended."""
        for key, resumed in list(self._resumed.items()):
            seq = resumed.seq
            if seq.num_cached_tokens >= seq.num_prompt_tokens and seq.num_cached_tokens > resumed.hbm_tokens:
                del self._resumed[key]
                if seq.num_cached_tokens < resumed.tokens:
                    self._note(seq, seq.num_cached_tokens, resumed.tokens)

    def forget(self, seq: Seq) -> None:
        """ATOM has ended it."""
        self._resumed.pop(id(seq), None)

    def whole_tokens(self, seq: Seq) -> int:
        """Leading tokens of a prompt that may be stored, now that it has its blocks: all, or those before a gap in what
        HBM has of it."""
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
                    return begin  # no chunk but whole ones is stored
        return seq.num_prompt_tokens

    def _note(self, seq: Seq, first: int, end: int) -> None:
        begin = first // self._chunk_tokens * self._chunk_tokens
        before = chunk_keys(seq.token_ids[:begin], self._chunk_tokens)[-KEY_BYTES:]
        missing = list(seq.token_ids[begin : first + 1])
        known = self._known.setdefault(before, [])
        if missing not in known:
            known.append(missing)
        self._known.move_to_end(before)
        while sum(map(len, self._known.values())) > GAPS_MAX:
            self._known.popitem(last=False)
        log.warning("output without KV request=%s first_token=%d tokens=%d", seq.id, first, end - first)

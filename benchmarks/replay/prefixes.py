"""Names of a prompt's blocks: token ids, the engine's own block digests, and the server's chunk keys.

The trace has block ids and no tokens, so a block's token ids are made from its id alone: equal ids are equal tokens
in every process. Digests and keys are chained from the namespace over token ids, never over trace ids.
"""

import hashlib
from array import array
from collections.abc import Sequence

from kvclient.keys import chunk_keys, namespace_digest
from kvserver.wire.messages import KEY_BYTES

TOKEN_ID = "I"
"""array type code of token ids: 32-bit, as kvclient packs them without a copy."""
TOKEN_IDS = 1 << 32


def replay_namespace(*, block_tokens: int, blocks_per_chunk: int, regions: int, page_bytes: int) -> bytes:
    """The namespace: a digest of everything that must be equal for two workers' bytes to be interchangeable."""
    return namespace_digest(
        {
            "model": "kvserver replay pattern 1",
            "block_tokens": block_tokens,
            "blocks_per_chunk": blocks_per_chunk,
            "regions": regions,
            "page_bytes": page_bytes,
        }
    )


class Prefixes:
    """Names prompts. Remembers earlier chains, because a conversation's prompts share their beginnings."""

    def __init__(self, namespace: bytes, *, block_tokens: int, blocks_per_chunk: int) -> None:
        self.namespace = namespace
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk
        self._digests: dict[tuple[bytes, int], bytes] = {}
        self._keys: dict[tuple[bytes, tuple[int, ...]], bytes] = {}

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        """The engine's own names: one per block, over the namespace and all tokens up to the block's end."""
        chained: list[bytes] = []
        parent = self.namespace
        for block in blocks:
            digest = self._digests.get((parent, block))
            if digest is None:
                digest = hashlib.blake2b(parent + self._token_ids([block]).tobytes(), digest_size=32).digest()
                self._digests[parent, block] = digest
            chained.append(digest)
            parent = digest
        return chained

    def keys(self, blocks: Sequence[int]) -> list[bytes]:
        """The server's names: one per whole chunk."""
        chunks = [
            tuple(blocks[i : i + self._blocks_per_chunk])
            for i in range(0, len(blocks) - self._blocks_per_chunk + 1, self._blocks_per_chunk)
        ]
        chained: list[bytes] = []
        parent = b""
        for chunk in chunks:
            key = self._keys.get((parent, chunk))
            if key is None:
                break
            chained.append(key)
            parent = key
        return chained + self._new_keys(parent, chunks[len(chained) :])

    def _new_keys(self, parent: bytes, chunks: Sequence[tuple[int, ...]]) -> list[bytes]:
        tokens = self._token_ids([block for chunk in chunks for block in chunk])
        packed = chunk_keys(tokens, self._block_tokens * self._blocks_per_chunk, parent=parent)
        keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
        for chunk, key in zip(chunks, keys, strict=True):
            self._keys[parent, chunk] = key
            parent = key
        return keys

    def _token_ids(self, blocks: Sequence[int]) -> "array[int]":
        tokens = array(TOKEN_ID)
        for block in blocks:
            first = block * self._block_tokens
            tokens.extend((first + i) % TOKEN_IDS for i in range(self._block_tokens))
        return tokens

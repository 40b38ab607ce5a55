"""The content of messages.Explained: what a lookup would be answered now, and why no more. Fields may be added.

Nothing is changed by asking: no lease, no last use, no counter."""

import msgspec


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one namespace."""

    namespace: str
    """Hexadecimal."""
    chunk_tokens: int
    """0 where nothing is known under the namespace."""
    chunks_asked: int
    chunks: int
    """Leading chunks that would be offered."""
    chunks_on_disk: int
    """How many of `chunks` have to be read from disk first."""
    why: str
    """Why they are no more (service/requests/miss_reason.py)."""
    key: str = ""
    """Key of the first chunk that would not be offered, hexadecimal. Empty when all would."""
    cause: str = ""
    """Why that chunk has left, if it has (service/telling/evicted_keys.py)."""
    gone_s: float = 0.0
    """How long ago."""
    held_in: list[str] = []
    """Other namespaces that hold this very key: the engines that should share differ in something."""


encode_explanations = msgspec.json.Encoder().encode
decode_explanations = msgspec.json.Decoder(list[Explanation]).decode

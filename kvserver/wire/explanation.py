"""The content of messages.Explained: the answer that a lookup would get now, and why it is not longer.

Fields may be added. The question changes nothing: no lease, no last use, no counter."""

import msgspec


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one namespace."""

    namespace: str
    """Hexadecimal."""
    chunk_tokens: int
    """0 if the namespace is not known."""
    chunks_asked: int
    chunks: int
    """Leading chunks that would be offered."""
    chunks_on_disk: int
    """Part of `chunks` that has to be read from disk first."""
    why: str
    """Why no more would be offered (service/requests/miss_reason.py)."""
    key: str = ""
    """Key of the first chunk that would not be offered, hexadecimal. Empty: all would be."""
    cause: str = ""
    """Why that chunk has left, if it was held (service/telling/evicted_keys.py)."""
    gone_s: float = 0.0
    """Time since it left."""
    remote: str = ""
    """Why the remote store has not brought it (service/requests/remote_reason.py). Empty: there is none, or there are
    several."""
    remote_s: float = 0.0
    """For so long it is not asked for."""
    remotes: dict[str, tuple[str, float]] = {}
    """Several remote stores -> both of these for each."""
    producer: str = ""
    """The engine that says that it computes this chunk now. Empty: none does."""
    producer_s: float = 0.0
    """Others wait for it so long at most, unless it stores something before."""
    held_in: list[str] = []
    """Other namespaces that hold this key: the engines should share, but differ in a setting."""


encode_explanations = msgspec.json.Encoder().encode
decode_explanations = msgspec.json.Decoder(list[Explanation]).decode

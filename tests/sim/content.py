"""The right bytes: a block's content is a function of namespace, key, group, shard and place in the chunk.

Nothing is copied for real: one Python value stands for the bytes of one block of one shard. Garbage is a value that
equals no other. Keys name paths in a small tree of prefixes shared by all namespaces, so equal keys occur in many of
them.
"""

import hashlib
from itertools import count

Path = tuple[int, ...]
Block = tuple[object, ...]

_keys: dict[Path, bytes] = {(): b""}
_paths: dict[bytes, Path] = {b"": ()}


def key_of(path: Path) -> bytes:
    """The key of the chunk at the end of this prefix; empty for the empty prefix."""
    key = _keys.get(path)
    if key is None:
        key = _keys[path] = hashlib.sha256(repr(path).encode()).digest()
        _paths[key] = path
    return key


def path_of(key: bytes) -> Path:
    """The prefix that a key names; only for keys that key_of() has made."""
    return _paths[key]


def is_chain(keys: list[bytes]) -> bool:
    """True for known keys that form one prefix, starting at its first chunk."""
    path = _paths.get(keys[-1])
    return path is not None and keys_of(path) == keys


def names_two_prefixes(keys: list[bytes]) -> bool:
    """True for keys that no engine asks for: they begin one prefix and go on with another's."""
    known = [key for key in keys if key in _paths]
    return bool(known) and not is_chain(known)


def keys_of(path: Path, first: int = 0) -> list[bytes]:
    """The keys of chunks first … len(path) - 1 of a prefix."""
    return [key_of(path[: depth + 1]) for depth in range(first, len(path))]


def block_of(digest: bytes, key: bytes, group: int, shard: int, place: int) -> Block:
    """The right content of the block at `place` in its chunk."""
    return (digest, key, group, shard, place)


class Garbage:
    """Makes contents that equal nothing else."""

    def __init__(self) -> None:
        self._serial = count(1)

    def __call__(self) -> Block:
        return ("garbage", next(self._serial))

"""A KV-event subscriber that receives every event: its picture must equal the chunks that the service holds."""

from collections import Counter

from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, NamespaceCleared

from .content import path_of
from .memory import Wrong

Fact = tuple[bytes, bytes, str]
"""Namespace, key, tier."""


class Subscriber:
    """The subscriber's picture. It outlives brains, as a real subscriber does."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._known: set[Fact] = set()
        self._speaks = False

    def take(self, events: list[KvEvent]) -> None:
        """Applies events. A stored chunk must be announced under its true parent."""
        for event in events:
            match event:
                case Begun(chunks):
                    self._known.clear()
                    self._speaks = True
                    self._counts["told by a later brain"] += chunks
                case NamespaceCleared(namespace):
                    self._known = {fact for fact in self._known if fact[0] != namespace}
                case ChunksStored(namespace, tier, parent, keys):
                    self._counts[f"told of {tier}"] += len(keys)
                    for before, key in zip([parent, *keys[:-1]], keys, strict=True):
                        if path_of(key)[:-1] != path_of(before):
                            raise Wrong(f"chunk {path_of(key)} is told under the parent {path_of(before)}")
                        self._known.add((namespace, key, tier))
                case ChunksRemoved(namespace, tier, keys):
                    for key in keys:
                        self._known.discard((namespace, key, tier))

    def check(self, held: set[Fact], untold: set[tuple[bytes, bytes]]) -> None:
        """Compares with the service. untold: chunks whose events are still to be sent."""
        if not self._speaks:
            return
        if wrong := self._known - held:
            raise Wrong(f"subscribers believe that {sorted(wrong)[0]} is held")
        if missing := [fact for fact in held - self._known if fact[:2] not in untold]:
            raise Wrong(f"subscribers were not told of {missing[0]}")

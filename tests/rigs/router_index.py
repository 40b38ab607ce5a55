"""A router's index of one engine's blocks. It takes an event stream only if that makes sense in every detail."""

from collections.abc import Iterable

from tests.rigs.router_decoders import Seen


class Nonsense(Exception):
    """The events contradict each other."""


class Index:
    """Which blocks the engine can get, by tier."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, str]] = set()
        """(hash, tier)."""
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Hash -> the hash before and the block's tokens, as told last."""

    def take(self, events: Iterable[Seen]) -> None:
        for event in events:
            if event.tag == "AllBlocksCleared":
                self.blocks.clear()
            elif event.tag == "BlockStored":
                self._stored(event)
            else:
                self._removed(event)

    def _stored(self, event: Seen) -> None:
        if event.parent is not None and not self._holds(event.parent):
            raise Nonsense(f"block {event.hashes[0]:x} is told under {event.parent:x}, which is nowhere")
        parent = event.parent
        for place, block in enumerate(event.hashes):
            if (block, event.tier) in self.blocks:
                raise Nonsense(f"block {block:x} is told twice in {event.tier}")
            self.blocks.add((block, event.tier))
            tokens = tuple(event.tokens[place * event.block_size : (place + 1) * event.block_size])
            if self.tokens.setdefault(block, (parent, tokens)) != (parent, tokens):
                raise Nonsense(f"block {block:x} has other tokens or another parent than before")
            parent = block

    def _removed(self, event: Seen) -> None:
        for block in event.hashes:
            if (block, event.tier) not in self.blocks:
                raise Nonsense(f"block {block:x} leaves {event.tier}, where it was not")
            self.blocks.discard((block, event.tier))

    def _holds(self, block: int) -> bool:
        return any((block, tier) in self.blocks for tier in ("cpu", "storage", "gpu", "host-pinned", "disk", "device"))

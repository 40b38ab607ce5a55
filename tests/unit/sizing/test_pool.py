"""The prefix cache of a replay worker, compared with a model that keeps every chain in a plain dict."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.sizing.pool import PrefixPool


def _digests(prompt: list[int]) -> list[bytes]:
    """Chained digests: equal exactly if the whole prefix is."""
    return [repr(prompt[: i + 1]).encode() for i in range(len(prompt))]


def _cache(pool: PrefixPool, digests: list[bytes]) -> list[int]:
    held = pool.match(digests)
    fresh = pool.allocate(len(digests) - len(held))
    assert fresh is not None
    blocks = held + fresh
    for i in range(len(held), len(digests)):
        blocks[i] = pool.adopt(blocks[i], digests[i])
    return blocks


def test_pinned_blocks_are_never_given_away() -> None:
    pool = PrefixPool(4)
    blocks = _cache(pool, _digests([1, 2, 3]))
    assert pool.allocate(2) is None
    assert pool.pinned == 3
    pool.release(blocks)
    assert pool.allocate(4) is not None


class _Model:
    """Model of the cached chains: a dict from digest to (last use, depth).

    Evicts the oldest use first, deepest first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.cached: dict[bytes, tuple[int, int]] = {}
        self.uses = 0

    def use(self, digests: list[bytes], taken: int, pinned: set[bytes]) -> int:
        """Uses a chain and caches all of it; returns the length of the matched prefix.

        `taken` blocks are pinned and hold no digest."""
        held = 0
        while held < len(digests) and digests[held] in self.cached:
            held += 1
        keep = pinned | set(digests[:held])
        while len(self.cached) + taken + len(digests) - held > self.blocks:
            idle = [digest for digest in self.cached if digest not in keep]
            del self.cached[min(idle, key=lambda digest: (self.cached[digest][0], -self.cached[digest][1]))]
        self.uses += 1
        self.cached.update({digest: (self.uses, depth) for depth, digest in enumerate(digests)})
        return held


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40), st.integers(6, 15))
def test_one_request_at_a_time_is_leaf_first_lru(prompts: list[list[int]], blocks: int) -> None:
    pool, model = PrefixPool(blocks), _Model(blocks)
    for prompt in prompts:
        digests = _digests(prompt)
        held = pool.match(digests)
        pool.release(held)
        used = _cache(pool, digests)
        assert len(held) == model.use(digests, 0, set())
        pool.release(used)
        pool.check()
        assert set(pool._by_digest) == set(model.cached)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_hits_have_no_hole_whatever_stays_pinned_for_how_long(data: st.DataObject) -> None:
    """Stores keep a prefix pinned while others come and go; still no cached block loses the block before it."""
    pool = PrefixPool(13)
    pinned: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if pinned and data.draw(st.booleans()):
            pool.release(pinned.pop(data.draw(st.integers(0, len(pinned) - 1))))
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        digests = _digests(prompt)
        held = pool.match(digests)
        fresh = pool.allocate(len(digests) - len(held))
        if fresh is None:
            pool.release(held)
            continue
        blocks = held + fresh
        for i in range(len(held), len(digests)):
            blocks[i] = pool.adopt(blocks[i], digests[i])
        stored = blocks[: data.draw(st.integers(0, len(blocks)))]
        pool.pin(stored)
        pinned.append(stored)
        pool.release(blocks)
        pool.check()
        for digest in pool._by_digest:
            parent = eval(digest)[:-1]
            assert not parent or repr(parent).encode() in pool._by_digest
    for blocks in pinned:
        pool.release(blocks)
    assert pool.pinned == 0

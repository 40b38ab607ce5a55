"""The estimate of an infinite cache's hits, against exact counts."""

import random

import pytest

from kvserver.service.telling.reuse import ASKED_MIN, TAILS_MAX, Reuse, Sketch
from kvserver.wire.messages import KEY_BYTES

HOUR_NS = 3600 * 1_000_000_000
ONE, OTHER = bytes(range(32)), bytes(range(1, 33))


class Exact:
    """The same figures, counted exactly with a set."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.asked = 0

    def ask(self, keys: bytes) -> None:
        self.asked += len(keys) // KEY_BYTES
        self.seen |= {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}

    @property
    def hit_ratio(self) -> float:
        return 1 - len(self.seen) / self.asked


def infinite(reuse: Reuse) -> dict[str, float]:
    return {window: ratios.infinite for window, ratios in reuse.ratios().items()}


def prompts(rng: random.Random, count: int, tenants: int) -> list[bytes]:
    """Conversations: each turn is a conversation's prefix and a few new chunks; some begin with a shared head."""
    heads = [rng.randbytes(KEY_BYTES * rng.randrange(1, 60)) for _ in range(tenants)]
    talks = [rng.choice(heads) for _ in range(tenants * 5)]
    said = []
    for _ in range(count):
        talk = rng.randrange(len(talks))
        if rng.random() < 0.1:
            talks[talk] = rng.choice(heads)
        talks[talk] += rng.randbytes(KEY_BYTES * rng.randrange(0, 9))
        said.append(talks[talk])
    return said


@pytest.mark.parametrize("distinct", [0, 1, 7, 100, 2_047, 5_000, 40_000, 150_000])
def test_distinct_things_are_counted_within_four_standard_errors(distinct: int) -> None:
    rng, sketch = random.Random(distinct), Sketch()
    things = [rng.getrandbits(56) for _ in range(distinct)]
    for thing in things + things[::3]:
        sketch.add(thing)
    assert sketch.distinct() == pytest.approx(distinct, rel=4 * 1.04 / 2048**0.5, abs=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_the_hit_ratio_is_that_of_exact_counts(seed: int) -> None:
    rng = random.Random(seed)
    reuse, exact = Reuse(0), Exact()
    for keys in prompts(rng, 3000, 1 + 7 * seed):
        reuse.asked(ONE, keys, 0)
        exact.ask(keys)
    assert 0.3 < exact.hit_ratio < 1
    assert infinite(reuse) == {
        "1h": pytest.approx(exact.hit_ratio, abs=0.05),
        "1d": pytest.approx(exact.hit_ratio, abs=0.05),
    }


def test_nothing_is_said_before_enough_was_asked_and_new_prompts_alone_hit_nothing() -> None:
    rng, reuse = random.Random(1), Reuse(0)
    assert infinite(reuse) == {}
    reuse.asked(ONE, rng.randbytes(KEY_BYTES * (ASKED_MIN - 1)), 0)
    assert infinite(reuse) == {}
    reuse.turn(HOUR_NS)
    reuse.asked(ONE, rng.randbytes(KEY_BYTES), 0)
    assert infinite(reuse) == {}
    reuse.turn(2 * HOUR_NS)
    assert infinite(reuse) == {"1d": pytest.approx(0, abs=0.5)}, "too little for each hour, enough for their day"
    for _ in range(700):
        reuse.asked(ONE, rng.randbytes(KEY_BYTES * 131), 0)
    assert infinite(reuse)["1h"] < 0.08


def test_the_same_keys_in_another_namespace_are_other_chunks() -> None:
    rng, reuse = random.Random(2), Reuse(0)
    for _ in range(400):
        keys = rng.randbytes(KEY_BYTES * 131)
        reuse.asked(ONE, keys, 0)
        reuse.asked(OTHER, keys, 0)
    assert infinite(reuse)["1h"] < 0.25


def test_a_window_says_what_the_whole_one_before_it_had() -> None:
    rng, reuse = random.Random(3), Reuse(0)
    keys = [rng.randbytes(KEY_BYTES * 131) for _ in range(300)]
    for _ in range(4):
        for each in keys:
            reuse.asked(ONE, each, 0)
    reuse.turn(HOUR_NS - 1)
    reuse.turn(HOUR_NS)
    for each in keys:  # once in this hour: all of it is new to the hour, and not to the day
        reuse.asked(ONE, each, 0)
    said = infinite(reuse)
    assert said["1h"] == pytest.approx(3 / 4, abs=0.05)
    assert said["1d"] == pytest.approx(4 / 5, abs=0.05)
    reuse.turn(2 * HOUR_NS)
    assert infinite(reuse)["1h"] < 0.1
    reuse.turn(3 * HOUR_NS)
    assert infinite(reuse)["1h"] < 0.1, "an hour in which nobody asked is no news"


def test_more_prompts_than_are_remembered_are_counted_all_the_same() -> None:
    rng, reuse, exact = random.Random(4), Reuse(0), Exact()
    keys = [rng.randbytes(KEY_BYTES * 11) for _ in range(TAILS_MAX + 400)]
    for each in keys + keys:
        reuse.asked(ONE, each, 0)
        exact.ask(each)
    assert exact.hit_ratio == 0.5
    assert infinite(reuse)["1h"] == pytest.approx(0.5, abs=0.05)


def test_held_chunks_are_counted_over_the_same_lookups_as_the_estimate() -> None:
    rng, reuse = random.Random(5), Reuse(0)
    for _ in range(300):
        keys = rng.randbytes(KEY_BYTES * 131)
        reuse.asked(ONE, keys, 0)
        reuse.asked(ONE, keys, 97)
    held = 97 / 262
    assert {window: each.held for window, each in reuse.ratios().items()} == pytest.approx({"1h": held, "1d": held})
    assert reuse.ratios()["1h"].infinite == pytest.approx(0.5, abs=0.05)
    reuse.turn(HOUR_NS)
    for _ in range(300):
        reuse.asked(ONE, rng.randbytes(KEY_BYTES * 131), 0)
    assert reuse.ratios()["1h"].held == pytest.approx(held), "the running hour has no part in the last whole one"


def test_an_infinite_cache_holds_what_is_held_from_before_the_window() -> None:
    """Everything was stored in an earlier hour, and each prompt comes back once in this one."""
    rng, reuse = random.Random(6), Reuse(0)
    for _ in range(300):
        reuse.asked(ONE, rng.randbytes(KEY_BYTES * 131), 127)
    for held, most in reuse.ratios().values():
        assert held == pytest.approx(127 / 131)
        assert most == held

"""The line that a connector logs for each request: milliseconds, and a reason whenever the server was asked nothing."""

import pytest

from tests.rigs.offload_rig import CHUNK, Desk


def line(desk: Desk) -> str:
    return str(*desk.offload.take_summaries())


def test_the_line_has_the_milliseconds_of_loads_and_stores() -> None:
    """A job takes as long as on its slowest rank. Several stores of one request are added up."""
    desk = Desk(ranks=2)
    load = desk.retrieving(tokens=61, found=2)
    desk.retrieve_ends(load, rank=0, seconds=0.0031)
    desk.retrieve_ends(load, rank=1, seconds=0.0127)
    for tokens, seconds in ((36, 0.002), (61, 0.0055)):
        store = desk.stored(tokens=tokens)
        assert store is not None
        desk.store_ends(store, rank=1, seconds=seconds)
        desk.store_ends(store, rank=0, seconds=0.001)
    desk.offload.finish("r")
    assert line(desk) == "request=r prompt=61 hbm=0 hit=24 loaded=24 load_ms=12.7 stored=36 store_ms=7.5"


def test_a_load_that_failed_has_its_time_too() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=40, found=2), "timeout", seconds=10.0)
    desk.offload.finish("r")
    assert line(desk) == "request=r prompt=40 hbm=0 hit=24 loaded=0 load_ms=10000.0 stored=0 why=timeout"


def ends_without_asking(desk: Desk, tokens: int, *, hbm: int = 0, reads: bool = True) -> str:
    desk.begin(tokens=tokens, reads=reads)
    assert desk.match(tokens=tokens, hbm=hbm) == 0
    desk.offload.admitted("r", hbm_tokens=hbm)
    assert not desk.offload.computed("r", tokens, desk.now_s)
    assert desk.offload.take_lookups() == []
    desk.offload.finish("r")
    return line(desk)


def test_a_prompt_that_is_shorter_than_a_chunk_says_so() -> None:
    assert ends_without_asking(Desk(), CHUNK - 1) == "request=r prompt=11 hbm=0 hit=0 loaded=0 stored=0 why=below-chunk"


@pytest.mark.parametrize(
    ("tokens", "hbm", "reads", "why"),
    [(41, 40, True, "in-hbm"), (17, 0, True, "below-min"), (41, 0, False, "no-reads")],
)
def test_an_engine_that_only_loads_says_why_it_did_not_ask(tokens: int, hbm: int, reads: bool, why: str) -> None:
    desk = Desk(stores=False, retrieve_tokens_min=20)
    assert ends_without_asking(desk, tokens, hbm=hbm, reads=reads).endswith(f" why={why}")


def test_a_request_that_ends_before_its_turn_says_so() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.offload.finish("r")
    assert line(desk).endswith(" stored=0 why=not-admitted")


def test_a_server_that_cannot_be_asked_yet_is_the_reason_and_is_asked_later() -> None:
    desk = Desk()
    desk.offload.set_unavailable("no-namespace")
    assert desk.offload.next_to_ask() is None
    assert ends_without_asking(desk, 40).endswith(" stored=0 why=no-namespace")
    desk.offload.set_unavailable("")
    desk.begin("s", tokens=40)
    assert desk.offload.next_to_ask() == "s"
    assert desk.match("s", tokens=40) is None
    assert len(desk.offload.take_lookups()) == 1


def test_chunks_that_were_left_out_because_too_many_stores_ran_say_so() -> None:
    desk = Desk(stores_max=1)
    desk.admit("a", tokens=40)
    assert desk.stored("a", tokens=40) is not None
    desk.admit("b", tokens=40)
    assert desk.stored("b", tokens=40) is None
    desk.offload.finish("b")
    assert line(desk).endswith("stored=0 why=busy")


def test_a_request_whose_chunks_are_all_held_needs_no_reason() -> None:
    desk = Desk()
    desk.admit(tokens=40, hbm=40, found=3)
    assert desk.stored(tokens=40) is None
    desk.offload.finish("r")
    assert line(desk) == "request=r prompt=40 hbm=40 hit=36 loaded=0 stored=0"

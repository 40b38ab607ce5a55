"""The life of a server's answer: how long it is believed, when it is too late, and what holds while it is renewed."""

from tests.rigs.offload_rig import CHUNK, Desk


def test_a_late_answer_is_a_miss_and_its_lease_is_given_back() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    order = desk.lookup()
    desk.now_s += desk.options.lookup_deadline_s - 0.001
    assert desk.match(tokens=40) is None
    desk.now_s += 0.001
    assert desk.match(tokens=40) == 0
    lease = desk.answer(3, order=order)
    assert desk.offload.take_releases() == [lease]
    assert desk.offload.statistics.lookups_late == 1
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.offload.statistics.skipped_tokens == {"late": 39}


def test_a_late_answer_is_not_taken_for_that_of_the_next_question() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    first = desk.lookup()
    for wait_s in (desk.options.lookup_deadline_s, 0.0):  # given up, and looked at once more
        desk.now_s += wait_s
        assert desk.match(tokens=40) == 0
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=40) == 0, "what was said stands while it is asked for anew"
    second = desk.lookup()
    lease = desk.answer(1, order=first)
    assert desk.match(tokens=40) == 0
    assert desk.offload.take_releases() == [lease]
    desk.answer(3, order=second)
    assert desk.match(tokens=40) == 3 * CHUNK


def test_a_whole_answer_is_good_for_as_long_as_its_lease() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(3, ttl_s=20)
    desk.now_s += 18.9
    assert desk.match(tokens=40) == 3 * CHUNK
    desk.now_s += 0.2
    assert desk.match(tokens=40) is None


def test_leases_of_a_server_that_does_not_answer_are_not_used_and_go_back() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    lease = desk.answer(3)
    desk.offload.leases_lost()
    assert desk.match(tokens=40) is None
    desk.answer(0, why="connection-lost")
    assert desk.match(tokens=40) == 0
    assert desk.offload.take_releases() == [lease]

"""The life of a server's answer: how long it is believed, when it is too late, and what holds while it is renewed."""

from tests.rigs.offload_rig import CHUNK, Desk, keys_of


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


def test_a_late_answer_still_says_what_need_not_be_stored() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    order = desk.lookup()
    desk.now_s += 1
    assert desk.match(tokens=40) == 0
    desk.offload.admitted("r", hbm_tokens=0)
    desk.answer(2, order=order)
    stored = desk.stored(tokens=40)
    assert stored is not None
    assert (stored.first_chunk, stored.keys) == (2, keys_of(3)[64:])


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


def test_an_answer_that_chunks_are_missing_is_believed_for_a_moment() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    first = desk.answer(1)
    assert desk.match(tokens=40) == CHUNK
    desk.now_s += desk.options.moment_s - 0.001
    assert desk.match(tokens=40) == CHUNK
    desk.now_s += 0.001
    assert desk.match(tokens=40) is None
    assert desk.offload.take_releases() == [], "until the answer comes, the lease keeps what is asked for"
    desk.answer(3)
    assert desk.offload.take_releases() == [first]
    assert desk.match(tokens=40) == 3 * CHUNK


def test_what_nobody_was_told_does_not_stand_when_it_has_grown_old() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.offload.ask("r", desk.now_s)
    desk.answer(0)
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=40) is None
    desk.answer(3)
    assert desk.match(tokens=40) == 3 * CHUNK


def test_a_request_that_waits_for_room_is_never_told_to_ask_again() -> None:
    """The engine would otherwise schedule later requests first, and give them the blocks that come free."""
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(0)
    asked = 0
    for _ in range(20):
        desk.now_s += desk.options.moment_s / 3
        assert desk.match(tokens=40) == 0
        for order in desk.offload.take_lookups():
            asked += 1
            desk.now_s += desk.options.lookup_deadline_s / 2
            assert desk.match(tokens=40) == 0
            desk.answer(0, order=order)
    assert asked > 3


def test_nothing_is_promised_that_an_answer_under_way_may_change() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    lease = desk.answer(1)
    assert desk.match(tokens=40, hbm=CHUNK) == 0
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=40, hbm=CHUNK) == 0
    assert desk.match(tokens=40) is None, "the engine has lost what it held, and an answer is under way"
    desk.answer(2)
    assert desk.offload.take_releases() == [lease]
    assert desk.match(tokens=40) == 2 * CHUNK


def test_two_questions_are_never_under_way() -> None:
    """The prompt was not worth a lease while the engine held it; the engine loses it while the question is repeated."""
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40, hbm=CHUNK)
    assert desk.answer(1) is None, "as much as the engine has"
    assert desk.match(tokens=40, hbm=CHUNK) == 0
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=40, hbm=CHUNK) == 0
    order = desk.lookup()
    assert desk.match(tokens=40) is None
    assert desk.offload.take_lookups() == []
    desk.answer(1, order=order)
    assert desk.match(tokens=40) is None
    assert desk.lookup().chunks_wanted_min == 1


def test_an_answer_is_used_once_however_slow_the_engines_steps_are() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(1)
    desk.now_s += 20 * desk.options.moment_s
    assert desk.match(tokens=40) == CHUNK


def test_a_whole_answer_is_good_for_as_long_as_its_lease() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(3, ttl_s=20)
    desk.now_s += 18.9
    assert desk.match(tokens=40) == 3 * CHUNK
    desk.now_s += 0.2
    assert desk.match(tokens=40) is None


def test_a_lease_that_is_too_short_to_be_used_is_a_miss_and_not_another_question() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    lease = desk.answer(3, ttl_s=desk.options.lease_spare_s / 2)
    assert desk.match(tokens=40) == 0
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.offload.take_lookups() == []
    assert desk.offload.take_releases() == [lease]


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


# ---------------------------------------------------------------- who may retrieve, and when

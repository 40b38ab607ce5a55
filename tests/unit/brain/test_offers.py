"""Offered descriptors: whose they are, and how many there may be."""

from kvserver.brain.offers import Offers
from kvserver.config.descriptor_limit import OFFERS_EACH

MOST = 3 * OFFERS_EACH


def test_descriptors_are_taken_once_by_their_numbers() -> None:
    offers = Offers(MOST)
    numbers = [offers.add(peer, descriptor) for peer, descriptor in ((1, 70), (2, 71), (1, 72))]
    assert offers.take(numbers[::-2]) == [72, 70]
    assert offers.take(numbers[1:2]) == [71]


def test_a_peer_may_offer_again_what_movers_have_got() -> None:
    offers = Offers(MOST)
    for _ in range(5 * MOST):
        assert not offers.no_room(1, with_movers=0)
        offers.take([offers.add(1, 70)])


def test_one_peer_leaves_room_for_another() -> None:
    offers = Offers(MOST)
    while not offers.no_room(1, with_movers=0):
        offers.add(1, 70)
    assert "there is room for" in offers.no_room(1, with_movers=0)
    for _ in range(OFFERS_EACH):
        assert not offers.no_room(2, with_movers=0)
        offers.add(2, 71)
    assert offers.no_room(2, with_movers=MOST)

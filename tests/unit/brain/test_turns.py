"""Turns of clients, with a clock that only requests move."""

from kvserver.brain.fair_turns import COMPLAINTS_A_NS, LIGHT_NS, Turns

MS = 1_000_000
TICK_NS = 50 * MS
START_NS = 7_000 * MS


class Brain:
    """Serves like the server's loop: new requests of light clients first, then one out of the line."""

    def __init__(self) -> None:
        self.turns: Turns[tuple[int, int]] = Turns(START_NS)
        self.now_ns = START_NS
        self.served_ns: dict[int, int] = {}
        self._next_tick_ns = START_NS + TICK_NS

    def come(self, client: int, cost_ns: int) -> bool:
        """Takes in a request; returns whether it is served at once."""
        if self.turns.at_once(client):
            self._serve(client, cost_ns)
            return True
        self.turns.wait(client, (client, cost_ns))
        return False

    def serve_next(self) -> int:
        """Serves the next request in line; returns its client."""
        item = self.turns.next()
        assert item is not None
        self._serve(*item)
        return item[0]

    def pass_time(self, until_ns: int) -> None:
        self.now_ns = max(self.now_ns, until_ns)
        while self._next_tick_ns <= self.now_ns:
            self.turns.tick()
            self._next_tick_ns += TICK_NS

    def _serve(self, client: int, cost_ns: int) -> None:
        self.turns.served(client, cost_ns)
        self.served_ns[client] = self.served_ns.get(client, 0) + cost_ns
        self.pass_time(self.now_ns + cost_ns)


def test_a_client_that_is_alone_never_waits() -> None:
    brain = Brain()
    assert all(brain.come(1, 3 * MS) for _ in range(100))
    assert not brain.turns


def test_a_light_client_is_served_at_once_beside_a_flood() -> None:
    brain = Brain()
    brain.come(2, 40_000)
    for _ in range(3 * LIGHT_NS // MS):
        brain.come(1, MS)
    assert not brain.come(1, MS), "it has cost enough to wait"
    asked = 0
    while brain.now_ns < START_NS + 3_000 * MS:
        assert brain.serve_next() == 1
        brain.come(1, MS)
        if brain.now_ns > START_NS + asked * 10 * MS:
            assert brain.come(2, 40_000), "100 lookups a second are light"
            asked += 1
    assert asked > 250
    assert brain.served_ns[1] > 2_900 * MS, "what the others leave is the flood's"


def test_heavy_clients_share_the_time_and_not_the_requests() -> None:
    costs = {1: 150_000, 2: 40_000, 3: 2 * MS}
    brain = Brain()
    for client, cost_ns in costs.items():
        brain.turns.wait(client, (client, cost_ns))
    while brain.now_ns < START_NS + 2_000 * MS:
        client = brain.serve_next()
        brain.turns.wait(client, (client, costs[client]))
    shares = [brain.served_ns[client] for client in costs]
    assert sum(shares) >= 2_000 * MS
    assert max(shares) < 1.1 * min(shares)


def test_requests_of_one_client_keep_their_order() -> None:
    turns: Turns[str] = Turns(START_NS)
    for name in ("first", "second", "third"):
        turns.wait(5, name)
    assert [turns.next() for _ in range(4)] == ["first", "second", "third", None]
    assert not turns


def test_what_was_paid_for_is_forgotten_and_who_waits_is_not() -> None:
    brain = Brain()
    brain.come(2, MS)
    while brain.come(1, 3 * MS):
        pass
    brain.pass_time(brain.now_ns + 1_000 * MS)
    assert brain.turns.at_once(1)
    assert brain.serve_next() == 1


def test_the_client_that_takes_much_is_named_once_a_minute() -> None:
    turns: Turns[str] = Turns(START_NS)
    named = []
    for second in range(1, 131):
        for _ in range(4_000):
            turns.served(41, 100_000, refused=True)
        for _ in range(100):
            turns.served(42, 100_000)
        turns.tick()
        complaint = turns.complaint(START_NS + second * 1_000 * MS)
        if complaint is not None:
            named.append((second, complaint))
    assert [second for second, _ in named] == [1, 1 + COMPLAINTS_A_NS // (1_000 * MS), 1 + 2 * 60]
    assert {complaint for _, complaint in named} == {(41, 4_000.0, 4_000.0, 40.0)}


def test_nobody_is_named_while_the_server_has_time() -> None:
    turns: Turns[str] = Turns(START_NS)
    for second in range(1, 70):
        for _ in range(2_000):
            turns.served(41, 100_000)
        assert turns.complaint(START_NS + second * 1_000 * MS) is None

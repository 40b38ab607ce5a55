"""Progress of a replay."""

from dataclasses import dataclass

from kvserver.sizing.outcome import Outcome


@dataclass
class Progress:
    """Progress of an arm, passed to the callback after every event, and at least every half second."""

    arm: str
    requests: int
    phase: str = "starting"
    """starting, running or stopping."""
    requests_ended: int = 0
    hbm_tokens: int = 0
    retrieved_tokens: int = 0
    computed_tokens: int = 0
    retrieved_bytes: int = 0
    stored_bytes: int = 0
    wrong_bytes: int = 0
    elapsed_s: float = 0.0
    """Since the first prompt was sent; while starting, since the start."""

    def count(self, outcome: Outcome) -> None:
        self.requests_ended += 1
        self.hbm_tokens += outcome.hbm_tokens
        self.retrieved_tokens += outcome.retrieved_tokens
        self.computed_tokens += outcome.computed_tokens
        self.retrieved_bytes += outcome.compared_bytes
        self.stored_bytes += outcome.store_bytes
        self.wrong_bytes += outcome.wrong_bytes + outcome.spot_wrong_bytes

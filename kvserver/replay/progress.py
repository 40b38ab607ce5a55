"""How far a replay is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far an arm is; handed to the callback about twice a second."""

    arm: str
    phase: str
    """starting, running or stopping."""
    requests: int
    requests_ended: int
    hbm_tokens: int
    retrieved_tokens: int
    computed_tokens: int
    retrieved_bytes: int
    stored_bytes: int
    wrong_bytes: int
    elapsed_s: float

"""How long a test waits between two looks at something that gives no signal."""

__all__ = ["pause_s"]

SHORTEST_S = 0.001
LONGEST_S = 0.02
PART = 10


def pause_s(waited_s: float) -> float:
    """The next pause: a tenth of what was waited so far, so short waits stay short and long ones take no core."""
    return min(max(SHORTEST_S, waited_s / PART), LONGEST_S)

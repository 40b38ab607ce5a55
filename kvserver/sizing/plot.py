"""Hit rate against the size of the arena as an SVG drawing; sizes are a factor of two apart on the axis."""

import math

from kvserver.sizing import chart
from kvserver.sizing.run import Sizing


def draw(sizing: Sizing) -> str:
    """Draws the sizing, which must have at least one size."""
    sizes = sorted(sizing.sizes, key=lambda size: size.arena_bytes)
    powers = [math.log2(size.arena_bytes / 1e9) for size in sizes]
    hit_tokens = {
        "from HBM": [size.hbm_tokens for size in sizes],
        "from HBM and DRAM": [size.hbm_tokens + size.server_tokens for size in sizes],
        "nothing is ever forgotten": [sizing.infinite_tokens] * len(sizes),
    }
    total = max(1, sizing.prompt_tokens)
    panel = chart.Panel(
        title="",
        lines=[
            chart.Line(name, [(power, 100 * hit / total) for power, hit in zip(powers, hits, strict=True)])
            for name, hits in hit_tokens.items()
        ],
        x=[(power, f"{2**power:.3g}") for power in powers],
        y=[(percent, str(percent)) for percent in range(0, 101, 20)],
    )
    title = f"{sizing.trace}: {sizing.requests:,} requests, token hit rate in %"
    return chart.draw(title, [panel], f"arena in GB, {sizing.token_bytes:,} bytes a token")

"""`kvserver size` predicts what `kvserver replay` measures with real servers and workers."""

from dataclasses import replace
from statistics import mean

from benchmarks.replay.options import Arm
from benchmarks.replay.run import run as replay
from kvserver.sizing.options import SizingOptions
from kvserver.sizing.run import run
from tests.process.programs.replays import TOO_SMALL

SIZES = (1 << 20, 3 << 20, 8 << 20)
POINTS = 1.0


def test_sizes_agree_with_replays_within_a_percentage_point() -> None:
    arms = tuple(Arm(f"{size} bytes", ("--arena-bytes", str(size))) for size in SIZES)
    options = replace(TOO_SMALL, requests=300, arms=arms)
    replays = [replay(options, lambda _: None) for _ in range(2)]  # no two replays are alike: requests overtake others
    assert all(measured.ok for measured in replays), [measured.problems for measured in replays]
    sizing = run(
        SizingOptions(
            requests=options.requests,
            users=options.users,
            context_tokens_max=options.context_tokens_max,
            pool_tokens=options.pool_tokens,
            token_bytes=options.block_bytes // options.block_tokens,
            arena_bytes=SIZES,
        ),
        lambda _: None,
    )
    both = zip(*(measured.arms for measured in replays), strict=True)
    rates = [mean(100 * (arm.hbm_tokens + arm.retrieved_tokens) / arm.prompt_tokens for arm in arms) for arms in both]
    sized = [100 * (size.hbm_tokens + size.server_tokens) / sizing.prompt_tokens for size in sizing.sizes]
    assert all(abs(one - other) <= POINTS for one, other in zip(rates, sized, strict=True)), (rates, sized)
    assert rates[0] + 2 * POINTS < rates[-1], "sizes at which nothing changes would show nothing"

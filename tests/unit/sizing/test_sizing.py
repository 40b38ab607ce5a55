"""Sizing: the service's own decisions at many sizes, and the printed result."""

import json
import random
import xml.etree.ElementTree as ET
from collections import OrderedDict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvserver.cli import main
from kvserver.errors import ConfigError
from kvserver.sizing.options import SizingOptions
from kvserver.sizing.plot import draw
from kvserver.sizing.report import render
from kvserver.sizing.run import Size, Sizing, run
from kvserver.sizing.trace import SAMPLES

UNIT = 4096
"""Slot bytes of a chunk of 7 tokens of 585 bytes."""
ONE_BY_ONE = {"workers": 1, "in_flight": 1, "pool_tokens": 0, "blocks_per_chunk": 1, "token_bytes": 585}


def key_log(tmp_path: Path, *prompts: list[str] | dict) -> str:
    path = tmp_path / "keys.jsonl"
    entries = [prompt if isinstance(prompt, dict) else {"keys": prompt} for prompt in prompts]
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return str(path)


def sized(trace: str, *arena_bytes: int, **options: int | str) -> Sizing:
    return run(SizingOptions(trace=trace, arena_bytes=arena_bytes, **{"block_tokens": 64, **options}), lambda _: None)


def chunks_hit(size: Size) -> int:
    return size.server_tokens // 64


def test_prompts_of_one_chunk_hit_as_a_plain_lru_does(tmp_path: Path) -> None:
    rng = random.Random(5)
    asked = [f"prompt {int(rng.paretovariate(0.5)) % 700}" for _ in range(3000)]
    trace = key_log(tmp_path, *([key] for key in asked))
    for slots in (16 * 5, 16 * 11):
        lru: OrderedDict[str, None] = OrderedDict()
        hits = 0
        for key in asked:
            hits += key in lru
            lru[key] = None
            lru.move_to_end(key)
            if len(lru) > slots:
                lru.popitem(last=False)
        slot_bytes = 64 * UNIT
        (size,) = sized(trace, slots * slot_bytes, **{**ONE_BY_ONE, "token_bytes": UNIT}).sizes
        assert size.arena_bytes == slots * slot_bytes
        assert chunks_hit(size) == hits
        assert size.hbm_tokens == 0
        assert size.evicted_chunks == len(asked) - hits - slots


def test_tokens_add_up_and_a_larger_arena_hits_no_less() -> None:
    sizing = sized(
        "claude-code", 3 << 20, 99 << 20, 1 << 30, requests=60, token_bytes=64, workers=1, in_flight=1, pool_tokens=0
    )
    rates = []
    for size in sizing.sizes:
        assert size.hbm_tokens + size.server_tokens + size.computed_tokens == sizing.prompt_tokens
        rates.append(size.hbm_tokens + size.server_tokens)
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert sizing.sizes[-1].evicted_chunks == 0 < sizing.sizes[0].evicted_chunks


def test_an_arena_that_holds_less_than_is_under_way_says_that_stores_are_cut_short(tmp_path: Path) -> None:
    """Prompts of eleven chunks, in room for five and for 32."""
    prompts = [{"keys": [f"{number}.{place}" for place in range(11)], "worker": number % 2} for number in range(6)]
    options = {**ONE_BY_ONE, "workers": 2, "token_bytes": UNIT}
    small, large = (sized(key_log(tmp_path, *prompts), chunks * 64 * UNIT, **options) for chunks in (5, 2 * 16))
    (cut,), (whole,) = small.sizes, large.sizes
    assert (cut.stores, whole.stores) == (6, 6)
    assert cut.stores_short == 6 > whole.stores_short == 0
    assert "stores are cut short" in render(small)
    assert "stores are cut short" not in render(large)


def test_half_the_bytes_a_token_hit_the_same_in_half_the_arena() -> None:
    """The printed report says this of FP8."""
    (wide,) = sized("claude-code", 64 << 20, requests=60, token_bytes=2048).sizes
    (narrow,) = sized("claude-code", 32 << 20, requests=60, token_bytes=1024).sizes
    assert wide.computed_tokens == narrow.computed_tokens
    assert wide.evicted_chunks == narrow.evicted_chunks > 0


def test_an_arena_that_holds_everything_hits_what_a_cache_without_end_does(tmp_path: Path) -> None:
    prompts = [["a", "b", "c"], ["a", "b", "d", "e"], ["a", "b", "d", "e", "f"], ["x"], ["a", "b", "c"]]
    sizing = sized(key_log(tmp_path, *prompts), **ONE_BY_ONE)
    assert len(sizing.sizes) == 8
    assert sizing.sizes[-1].server_tokens == sizing.infinite_tokens == 64 * (0 + 2 + 4 + 0 + 3)
    assert sizing.sizes[-1].arena_bytes >= sizing.unique_bytes
    assert sizing.prompt_tokens == sum(len(prompt) * 64 + 1 for prompt in prompts)


def test_requests_of_a_key_log_go_one_after_the_other_whoever_sent_them(tmp_path: Path) -> None:
    trace = key_log(tmp_path, *({"keys": ["a", "b"], "worker": worker} for worker in (0, 1, 1)))
    beside = sized(trace, 1 << 30, **{**ONE_BY_ONE, "in_flight": 2, "workers": 2})
    assert chunks_hit(beside.sizes[0]) == 4


def test_a_key_log_says_whose_prompts_and_how_long_they_are(tmp_path: Path) -> None:
    trace = key_log(tmp_path, {"keys": ["a", "b"], "tokens": 190, "worker": 1}, {"keys": ["a"], "tokens": 64})
    sizing = sized(trace, 1 << 30, **{**ONE_BY_ONE, "workers": 2})
    assert sizing.prompt_tokens == 254
    assert sizing.sizes[0].server_tokens == 0, "the last token of a prompt is always computed, so here its only block"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"keys": ["a", 7]}', "line 2"),
        ('{"keys": ["b"]}', "line 2: a key stands behind two different prefixes"),
        ('{"keys": ["a", "b"], "tokens": 127}', "line 2: 2 keys of 64 tokens are more than tokens=127"),
        ('{"keys": ["a"], "worker": -1}', "line 2"),
    ],
)
def test_a_key_log_that_does_not_hold_together_is_refused(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text(f'{{"keys": ["a", "b"]}}\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        sized(str(path), 1 << 30, **ONE_BY_ONE)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arena_bytes": (1 << 20,)}, "do not hold one chunk of 8388608 bytes"),
        ({"arena_bytes": (0,)}, "must be positive"),
        ({"arena_bytes": tuple(range(1, 66))}, "at most 64 are replayed"),
        ({"token_bytes": 0}, "token_bytes=0"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 3, "machines": 4}, "machines=4 must be in [1, workers=3]"),
        ({"remote_write": "evict"}, "remote_write='evict' must be none or reuse or through"),
        ({"remote_bytes": -1}, "remote_bytes=-1"),
    ],
)
def test_what_cannot_be_sized_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(SizingOptions(**{"requests": 3, "token_bytes": 32768, **options}), lambda _: None)
    assert says in str(caught.value)


def test_keys_name_chunks_of_any_number_of_blocks(tmp_path: Path) -> None:
    trace = key_log(tmp_path, ["a", "b"], ["c"], {"keys": ["a", "b"], "tokens": 2 * 3 * 16}, ["a", "d"])
    sizing = sized(trace, 1 << 20, **{**ONE_BY_ONE, "block_tokens": 16, "blocks_per_chunk": 3})
    assert sizing.sizes[0].server_tokens == sizing.infinite_tokens == 16 * (5 + 3), "never the last token"
    assert sizing.unique_bytes == 4 * 7 * UNIT


def test_table_json_and_drawing_say_the_same(tmp_path: Path) -> None:
    plot = tmp_path / "size.svg"
    flags = ("--requests", "40", "--token-bytes", "1KiB", "--arena-bytes", "16MiB, 1GiB", "--workers", "1")
    done = CliRunner().invoke(main.app, ["size", "mooncake", *flags, "--json", "--plot", str(plot)])
    shown = json.loads(done.stdout)
    sizing = sized("mooncake", 16 << 20, 1 << 30, requests=40, token_bytes=1024, workers=1)
    assert shown["sizes"] == [{name: getattr(size, name) for name in Size.__struct_fields__} for size in sizing.sizes]
    text = CliRunner().invoke(main.app, ["size", "mooncake", *flags]).stdout
    assert text.strip() == render(sizing)
    hit = sizing.sizes[1].hbm_tokens + sizing.sizes[1].server_tokens
    assert f"{100 * hit / sizing.prompt_tokens:.1f} %" in text
    assert "in FP8 a token takes 512 bytes" in text
    assert plot.read_text() == draw(sizing)
    lines = ET.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2, 2]
    assert "mooncake" in SAMPLES


ACROSS = {"workers": 3, "machines": 3, "in_flight": 1, "pool_tokens": 0, "blocks_per_chunk": 16, "token_bytes": 64}
"""Three machines with a worker each, and chunks of 1,024 tokens, fewer than which are not read from a store."""
LARGE = 1024 * 64
"""Bytes of such a chunk."""


@pytest.mark.parametrize(
    ("write", "store_chunks", "expected"),
    [("none", 0, (2, 0, 0)), ("through", 0, (6, 4, 2)), ("reuse", 0, (4, 2, 2)), ("through", 1, (3, 1, 4))],
)
def test_machines_hit_what_others_have_written_to_the_store(
    tmp_path: Path, write: str, store_chunks: int, expected: tuple[int, int, int]
) -> None:
    """The same two chunks, at the second machine twice. A store of one chunk has lost the first when the second machine
    looks for it, which writes it again, and the third finds it there. expected: chunks that were hit, read from the
    store, and written to it."""
    trace = key_log(tmp_path, *({"keys": ["a", "b"], "worker": worker} for worker in (0, 1, 1, 2)))
    sizing = sized(trace, 1 << 20, **ACROSS, remote_write=write, remote_bytes=store_chunks * LARGE)
    (size,) = sizing.sizes
    chunks = size.server_tokens // 1024, size.remote_tokens // 1024, size.remote_written_bytes // LARGE
    assert chunks == expected
    assert size.hbm_tokens + size.server_tokens + size.computed_tokens == sizing.prompt_tokens
    assert ("from store" in render(sizing)) == (write != "none")


def test_what_two_machines_have_stored_the_second_has_written_and_a_third_reads(tmp_path: Path) -> None:
    """With `reuse`, although no machine uses anything twice."""
    trace = key_log(tmp_path, *({"keys": ["a", "b"], "worker": worker} for worker in (0, 1, 2)))
    (size,) = sized(trace, 1 << 20, **ACROSS, remote_write="reuse").sizes
    assert size.server_tokens == size.remote_tokens == 2 * 1024
    assert size.remote_written_bytes == 2 * LARGE


def test_a_store_drops_what_was_used_longest_ago_and_a_look_is_a_use(tmp_path: Path) -> None:
    """Chunks a and b are in a store of two when c comes: b leaves, because the second machine has asked for a."""
    asked = [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("a", 2), ("b", 1)]
    trace = key_log(tmp_path, *({"keys": [key], "worker": worker} for key, worker in asked))
    sizing = sized(trace, 1 << 20, **ACROSS, remote_write="through", remote_bytes=2 * LARGE)
    assert sizing.sizes[0].remote_tokens == 2 * 1024


def test_machines_with_a_store_without_end_hit_what_a_cache_without_end_does(tmp_path: Path) -> None:
    rng = random.Random(7)
    prompts = [
        {"keys": [f"{story}.{place}" for place in range(rng.randrange(1, 400))], "worker": rng.randrange(3)}
        for story in (rng.randrange(5) for _ in range(40))
    ]
    sizing = sized(key_log(tmp_path, *prompts), 5000 * LARGE, **ACROSS, remote_write="through")
    assert sizing.sizes[0].server_tokens == sizing.infinite_tokens > 0
    alone = sized(key_log(tmp_path, *prompts), 5000 * LARGE, **ACROSS)
    assert 0 < alone.sizes[0].server_tokens < sizing.infinite_tokens


def test_prompts_that_no_engine_or_request_could_hold_are_refused(tmp_path: Path) -> None:
    long = key_log(tmp_path, ["a", "b", "c"])
    pool = {"pool_tokens": 255, "context_tokens_max": 100}
    with pytest.raises(ConfigError, match="193 tokens does not fit pool_tokens=255"):
        sized(long, **{**ONE_BY_ONE, **pool})
    with pytest.raises(ConfigError, match="is more than 4096 chunks"):
        sized(key_log(tmp_path, [str(number) for number in range(4097)]), **ONE_BY_ONE)

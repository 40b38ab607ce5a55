"""The trace reader refuses inconsistent files, and reads the samples as their README says."""

from pathlib import Path

import pytest
import zstandard

from kvserver.errors import ConfigError
from kvserver.sizing.trace import load, session_prompts

SESSION = b'{"id":"a","tool":70,"sys":9,"seq":[0,1],"req":[[0,0.0,0.0,1.5,200,7,0,0,0],[0,3.0,1.5,2.0,331,7,1,2,1]]}'


def test_claude_code_sample_has_the_sums_of_its_readme() -> None:
    sessions = load("claude-code").sessions
    assert len(sessions) == 64
    assert sum(len(s.turns) for s in sessions) == 4745
    assert sum(turn.input_tokens for s in sessions for turn in s.turns) == 448_256_357
    assert sum(any(step < 0 for step in s.seq) for s in sessions) == 2


def test_mooncake_sample_has_the_sums_of_its_readme() -> None:
    arrivals = load("mooncake").arrivals
    assert len(arrivals) == 3000
    assert sum(a.input_tokens for a in arrivals) == 37_785_822


def test_prompt_has_its_full_blocks_and_shares_as_recorded(tmp_path: Path) -> None:
    (session,) = load(_file(tmp_path, SESSION)).sessions
    assert session_prompts(session) == [[0, 1, 2], [0, 1, 3, 4, 5]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (SESSION.replace(b"331,7,1,2", b"331,7,2,2"), "back=2 must be in [0, 1]"),
        (SESSION.replace(b"331,7,1,2", b"331,7,1,4"), "shared=4 must be in [0, 3]"),
        (SESSION.replace(b"331,7,1,2", b"331,7,0,1"), "shared=1 must be in [0, 0]"),
        (SESSION.replace(b"[0,1]", b"[0,2]"), "seq names request 2 of 2"),
        (SESSION.replace(b"[0,1]", b"[0,-3]"), "sub-agent 3, which has no requests"),
        (SESSION.replace(b"331", b"-64"), "in must not be negative"),
        (SESSION.replace(b"331", b'"x"'), "Expected `int`"),
        (SESSION.replace(b'"req"', b'"rek"'), "req"),
        (b'{"id":"a","tool":1,"sys":1,"seq":[],"req":[]}', "without requests"),
        (b"[0,1025,5]", "line 1"),
        (b"[0,1025,5,0,0]\n[0,9,5,3,1]", "line 2: back=3"),
        (b"[0,1025,5,0,0", "line 1"),
    ],
)
def test_a_line_that_does_not_hold_together_is_refused_with_its_reason(tmp_path: Path, line: bytes, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(_file(tmp_path, line))
    assert refusal.value.code == "trace-line"
    assert said in refusal.value.message


def test_a_damaged_an_empty_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "t.jsonl.zst"
    damaged.write_bytes(zstandard.compress(SESSION)[:-9])
    codes = []
    for path in (damaged, _file(tmp_path, b"\n"), tmp_path / "absent"):
        with pytest.raises(ConfigError) as refusal:
            load(str(path))
        codes.append(refusal.value.code)
    assert codes == ["trace-damaged", "trace-empty", "trace-unreadable"]


def _file(directory: Path, text: bytes) -> str:
    path = directory / "t.jsonl"
    path.write_bytes(text)
    return str(path)

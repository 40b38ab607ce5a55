"""Recorded traffic as stored in a file: which earlier request each request shares a prefix with; no bytes.

Two formats, described in data/README.md, told apart by their first line: sessions (one JSON object per line) and
requests in arrival order (one JSON array per line). A prompt is a list of block ids; ids are chained over the
prefix, so equal ids mean equal whole prefixes. An inconsistent file is refused here, with the line; later code
trusts its input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import zstandard

from kvserver.errors import ConfigError

SESSION_BLOCK_TOKENS = 64
ARRIVAL_BLOCK_TOKENS = 512
DATA = Path(__file__).parent / "data"
SAMPLES = {
    "claude-code": DATA / "claude_code_sample.jsonl.zst",
    "mooncake": DATA / "mooncake_conversation_sample.jsonl.zst",
}
TEXT_BYTES_MAX = 1 << 30
"""A longer trace is refused: it would not fit in memory once parsed."""
PACKED_READ_BYTES = 1 << 20
Entry = TypeVar("Entry")


class Turn(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request of a session. Times are seconds, -1 where nothing was recorded."""

    agent: int
    start_s: float
    think_s: float
    service_s: float
    input_tokens: int
    output_tokens: int
    back: int
    shared_blocks: int
    stop: int

    @property
    def blocks(self) -> int:
        """Full blocks of the prompt."""
        return self.input_tokens // SESSION_BLOCK_TOKENS


class Session(msgspec.Struct, frozen=True, rename={"tool_tokens": "tool", "system_tokens": "sys", "turns": "req"}):
    """One recorded conversation with its sub-agents."""

    id: str
    tool_tokens: int
    system_tokens: int
    seq: list[int]
    """The parent's order: v >= 0 sends turn v, v < 0 starts sub-agent -v."""
    turns: list[Turn]


class Arrival(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request of a trace in arrival order."""

    gap_ms: int
    input_tokens: int
    output_tokens: int
    back: int
    shared_blocks: int

    @property
    def blocks(self) -> int:
        return -(-self.input_tokens // ARRIVAL_BLOCK_TOKENS)


@dataclass(frozen=True)
class Trace:
    """A parsed trace. Exactly one of the two lists is filled."""

    name: str
    sessions: list[Session]
    arrivals: list[Arrival]


def load(source: str) -> Trace:
    """Reads a trace: the name of a sample or the path of a .jsonl or .jsonl.zst file."""
    path = SAMPLES.get(source, Path(source))
    lines = lines_of(path)
    if not lines:
        raise ConfigError("trace-empty", f"{path} holds no line")
    if lines[0].lstrip().startswith(b"{"):
        return Trace(source, sessions=_parse_sessions(path, lines), arrivals=[])
    return Trace(source, sessions=[], arrivals=_parse_arrivals(path, lines))


def session_prompts(session: Session) -> list[list[int]]:
    """The block ids of each turn, numbered from 0 within the session."""
    return _prompts(session.turns)


def arrival_prompts(arrivals: list[Arrival]) -> list[list[int]]:
    """The block ids of each arrival, numbered from 0 within the trace; the last block may be partial."""
    return _prompts(arrivals)


def _prompts(requests: Sequence[Turn | Arrival]) -> list[list[int]]:
    prompts: list[list[int]] = []
    unused = 0
    for request in requests:
        shared = prompts[-request.back][: request.shared_blocks] if request.back else []
        fresh = request.blocks - len(shared)
        prompts.append(shared + list(range(unused, unused + fresh)))
        unused += fresh
    return prompts


# ---------------------------------------------------------------- files and checks


def lines_of(path: Path) -> list[bytes]:
    """The non-empty lines of a text file, compressed or not."""
    try:
        with path.open("rb") as file:
            text = _text(file, path)
    except OSError as error:
        raise ConfigError("trace-unreadable", f"{path}: {error.strerror}") from error
    return [line for line in text.splitlines() if line.strip()]


def _text(file: BinaryIO, path: Path) -> bytes:
    if path.suffix != ".zst":
        return _bounded(file.read(TEXT_BYTES_MAX + 1), path)
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    text = b""
    try:
        while packed := file.read(PACKED_READ_BYTES):
            text = _bounded(text + unpacker.decompress(packed), path)
    except zstandard.ZstdError as error:
        raise ConfigError("trace-damaged", f"{path}: {error}") from error
    if not unpacker.eof:
        raise ConfigError("trace-damaged", f"{path} ends in the middle of its compressed data")
    return text


def _bounded(text: bytes, path: Path) -> bytes:
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError("trace-too-long", f"{path} holds more than {TEXT_BYTES_MAX} bytes of text")
    return text


def decoded(path: Path, lines: list[bytes], kind: type[Entry]) -> Iterator[tuple[str, Entry]]:
    """The place of each line, for messages, and what it holds. Raises ConfigError for a line that is something else."""
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(lines, start=1):
        place = f"{path}, line {number}"
        try:
            yield place, decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError("trace-line", f"{place}: {error}") from error


def _parse_sessions(path: Path, lines: list[bytes]) -> list[Session]:
    sessions = []
    for place, session in decoded(path, lines, Session):
        if problem := _session_problem(session):
            raise ConfigError("trace-line", f"{place}: {problem}")
        sessions.append(session)
    return sessions


def _parse_arrivals(path: Path, lines: list[bytes]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for place, arrival in decoded(path, lines, Arrival):
        arrivals.append(arrival)
        if problem := _sharing_problem(arrivals, len(arrivals) - 1):
            raise ConfigError("trace-line", f"{place}: {problem}")
    return arrivals


def _session_problem(session: Session) -> str:
    if not session.turns:
        return "a session without requests"
    if session.tool_tokens < 0 or session.system_tokens < 0:
        return f"tool={session.tool_tokens} and sys={session.system_tokens} must not be negative"
    for index in range(len(session.turns)):
        if problem := _sharing_problem(session.turns, index):
            return f"req[{index}]: {problem}"
    agents = {turn.agent for turn in session.turns}
    for step in session.seq:
        if step >= len(session.turns):
            return f"seq names request {step} of {len(session.turns)}"
        if step < 0 and -step not in agents:
            return f"seq starts sub-agent {-step}, which has no requests"
    return ""


def _sharing_problem(requests: Sequence[Turn | Arrival], index: int) -> str:
    """The error in one request's reference to an earlier one; empty if it is valid."""
    request = requests[index]
    if request.blocks < 0:
        return "in must not be negative"
    if not 0 <= request.back <= index:
        return f"back={request.back} must be in [0, {index}]"
    shareable = min(request.blocks, requests[index - request.back].blocks) if request.back else 0
    if not 0 <= request.shared_blocks <= shareable:
        return f"shared={request.shared_blocks} must be in [0, {shareable}]"
    return ""

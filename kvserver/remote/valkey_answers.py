"""Answers of a Valkey or Redis, each checked for the shape that its question has."""

import re
from typing import Any

from glide_shared.exceptions import GlideError

from kvserver.remote.announcement import MARK_BYTES

MARKS_FIELD = b"m"
"""The field of an entry that has its marks."""
ENTRY_ID = re.compile(rb"\d+-\d+")


class OutOfStepError(GlideError):
    """An answer has not the shape of its question: the stream was damaged, and what follows cannot be trusted."""


def listed_answers(answer: Any, count: int) -> list[Any]:
    if not isinstance(answer, list) or len(answer) != count:
        got = f"{len(answer)}" if isinstance(answer, list) else type(answer).__name__
        raise OutOfStepError(f"expected {count} answers, got {got}")
    return answer


def number_of(answer: Any) -> int | None:
    try:
        return None if answer is None else int(answer)
    except (TypeError, ValueError):
        raise OutOfStepError(f"expected a number, got {type(answer).__name__}") from None


def bytes_of(answer: Any) -> bytes | None:
    if answer is not None and not isinstance(answer, bytes):
        raise OutOfStepError(f"expected bytes, got {type(answer).__name__}")
    return answer


def id_order(entry: bytes) -> tuple[int, int]:
    """An id of a stream, to be compared. A stream that is begun anew by a clock that is behind has smaller ones."""
    first, _, second = entry.partition(b"-")
    return int(first), int(second)


def stream_entries(answer: Any) -> list[tuple[bytes, bytes]]:
    """Id and marks of each entry of a stream. One that has other fields counts as empty."""
    if answer is None:
        return []
    if not isinstance(answer, dict):
        raise OutOfStepError(f"expected entries of a stream, got {type(answer).__name__}")
    entries = []
    for name, pairs in answer.items():
        if not isinstance(pairs, list) or not isinstance(name, bytes) or not ENTRY_ID.fullmatch(name):
            raise OutOfStepError(f"expected the id and fields of an entry, got {type(pairs).__name__}")
        told = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] == MARKS_FIELD]
        whole = len(told) == 1 and isinstance(told[0], bytes) and len(told[0]) % MARK_BYTES == 0
        entries.append((name, told[0] if whole else b""))
    return entries

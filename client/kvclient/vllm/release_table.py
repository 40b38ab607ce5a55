"""The releases of vLLM that the connector was held against: releases.json, which tools/vllm_releases.py writes.

A release that the table calls broken is refused by name. One that the table does not have begins with a warning.
"""

import json
import re
from functools import cache
from importlib.resources import files

import msgspec

from kvserver.errors import RequestError


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One release, as far as it is known."""

    lacks: tuple[str, ...] = ()
    """Names that the connector needs and the release's sources do not have. One is enough to refuse the release."""
    refused: str = ""
    """Another reason to refuse it, found by running it."""
    uncalled: tuple[str, ...] = ()
    """Methods of the connector that nothing in the release calls."""
    hooks: tuple[str, ...] = ()
    """Methods of the base class that nobody here has read yet."""
    made: str = ""
    """The outcome of the tests that make the connector with the release's own classes. Empty: not run."""
    cpu: str = ""
    """The outcome of the end-to-end tests on a CPU. Empty: not run."""

    @property
    def why_broken(self) -> str:
        return "; ".join(filter(None, [*self.lacks, self.refused]))


@cache
def table() -> dict[str, Row]:
    """Rows by release, oldest first."""
    text = files("kvclient.vllm").joinpath("releases.json").read_text()
    return {release: msgspec.convert(row, Row) for release, row in json.loads(text).items()}


def row_of(version: str) -> Row | None:
    """The row of a build such as 0.26.0+cpu. None for development versions and for releases out of the table."""
    found = re.fullmatch(r"(\d+\.\d+\.\d+)(?:\.post\d+)?(?:\+.*)?", version)
    return table().get(found[1]) if found else None


def check_release(version: str) -> bool:
    """Whether the release is in the table. RequestError if it is known to be broken."""
    row = row_of(version)
    if row is not None and row.why_broken:
        raise RequestError(
            "vllm-release", f"vLLM {version} does not work with this connector: {row.why_broken}; see docs/vllm.md"
        )
    return row is not None


def newest() -> str:
    return list(table())[-1]

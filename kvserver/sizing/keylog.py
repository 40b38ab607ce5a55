"""A key log: the requests to a server or an engine, one JSON object a line, in the order of arrival.

    {"keys": ["9f2c…", "03ab…"], "tokens": 700, "worker": 1}

keys name the prompt's chunks from its beginning: any text, and the same text only for the same whole prefix, like
this server's keys and an engine's block hashes. tokens: length of the prompt; default: the tokens covered by keys,
plus one. worker: number of the engine that asked, from 0; default 0.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from kvserver.errors import ConfigError
from kvserver.sizing.trace import decoded, lines_of
from kvserver.sizing.workload import Prompt

MARK = b'"keys"'


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One line."""

    keys: list[str]
    tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    worker: Annotated[int, msgspec.Meta(ge=0)] = 0


def is_key_log(path: Path) -> bool:
    """True if the first line has keys; traces have none."""
    lines = lines_of(path)
    return bool(lines) and lines[0].lstrip().startswith(b"{") and MARK in lines[0]


def read(path: Path, *, block_tokens: int, blocks_per_chunk: int, workers: int, requests: int) -> list[Prompt]:
    """The log's prompts. Each waits for the one before: the log does not say what overlapped.

    requests: maximum number; 0: all.
    """
    chunk_tokens = block_tokens * blocks_per_chunk
    blocks: dict[str, int] = {}
    parents: dict[int, int] = {}
    prompts: list[Prompt] = []
    for place, entry in decoded(path, lines_of(path)[: requests or None], Entry):
        ids = [blocks.setdefault(key, len(blocks) + 1) for key in entry.keys]
        for parent, block in zip([0, *ids], ids, strict=False):
            if parents.setdefault(block, parent) != parent:
                raise ConfigError("trace-line", f"{place}: a key stands behind two different prefixes")
        tokens = entry.tokens if entry.tokens is not None else len(ids) * chunk_tokens + 1
        if tokens < len(ids) * chunk_tokens:
            raise ConfigError(
                "trace-line",
                f"{place}: {len(ids)} keys of {chunk_tokens} tokens are more than tokens={tokens}",
            )
        prompts.append(
            Prompt(
                index=len(prompts),
                at_s=0.0,
                conversation=0,
                worker=entry.worker % workers,
                tokens=tokens,
                blocks=[chunk * blocks_per_chunk + part for chunk in ids for part in range(blocks_per_chunk)],
                after=(len(prompts) - 1,) if prompts else (),
            )
        )
    return prompts

"""The longest boundary that every group can serve.

A boundary after b chunks is servable when
* every group of kind full is present in chunks 0 … b-1 (these are the ready nodes, space.py);
* every window group is present in the chunks that hold the last window_tokens tokens before the boundary;
* every state group is present in chunk b-1.

Checked against a brute-force reading of these three lines in tests/unit/holdings/test_index.py.
"""

from kvserver.errors import RequestError
from kvserver.index.space import Node, Space
from kvserver.wire.messages import KEY_BYTES


def servable_chunks(space: Space, keys: bytes) -> int:
    """The longest servable boundary of packed keys, in chunks.

    Raises RequestError("keys-chain") if the keys are not one chain. With full groups only, bisection looks at some
    keys; the first retrieve then compares the others with the chain."""
    chunks = space.ready_chunks(keys)
    if chunks == 0 or space.only_full:
        return chunks
    path = space.chain(space.nodes[keys[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES]])
    if b"".join([node.key for node in path]) != keys[: chunks * KEY_BYTES]:
        raise RequestError("keys-chain", f"the first {chunks} keys are not one chain: their parents differ")
    while chunks:
        lowered = chunks
        for index, group in enumerate(space.geometry.groups):
            if group.kind != "full":
                first = first_needed(space, index, chunks)
                lowered = min(lowered, _last_gap(path, index, first, chunks))
        if lowered == chunks:
            break
        chunks = lowered
    return chunks


def first_needed(space: Space, group: int, chunks: int) -> int:
    """The first chunk that a group needs for a boundary after `chunks` chunks."""
    shape = space.geometry.groups[group]
    match shape.kind:
        case "full":
            return 0
        case "state":
            return chunks - 1
        case "window":
            return max(0, (chunks * space.geometry.chunk_tokens - shape.window_tokens) // space.geometry.chunk_tokens)


def needed_at(space: Space, position: int, chunks: int) -> int:
    """Groups (bits) of the chunk at this position that a boundary after `chunks` chunks needs."""
    groups = range(len(space.geometry.groups))
    return sum(1 << group for group in groups if position >= first_needed(space, group, chunks))


def _last_gap(path: list[Node], group: int, first: int, chunks: int) -> int:
    """The last position in path[first:chunks] where the group is absent; `chunks` if there is none."""
    bit = 1 << group
    for position in range(chunks - 1, first - 1, -1):
        if not path[position].present & bit:
            return position
    return chunks

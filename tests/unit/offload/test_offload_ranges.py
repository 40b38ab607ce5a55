"""Blocks that a retrieve writes and a store reads, against a token by token reading of the rules."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvclient.offload.ranges import chunks_to_look_up, retrieve_blocks, store_blocks, usable_tokens
from kvclient.offload.values import Group, Options

NULL = 0

Tables = list[list[int]]


@st.composite
def options(draw: st.DrawFn) -> Options:
    block = draw(st.integers(1, 4))
    chunk = block * draw(st.integers(1, 4))
    kinds = [Group(block), Group(block, "window", draw(st.integers(1, 3 * chunk))), Group(chunk, "state"), Group(chunk)]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    return Options(chunk_tokens=chunk, groups=tuple(chosen), engine_steps_back=draw(st.booleans()), null_block=NULL)


def full_tables(shape: Options, tokens: int) -> Tables:
    """Tables in which a block id shows its group and place."""
    return [
        [1000 * (index + 1) + block for block in range(-(-tokens // group.block_tokens))]
        for index, group in enumerate(shape.groups)
    ]


def block_ids_of(shape: Options, tables: Tables, index: int, chunk: int) -> tuple[list[int], int]:
    """(block ids of a chunk in the table, how many there should be)."""
    per_chunk = shape.chunk_tokens // shape.groups[index].block_tokens
    return tables[index][chunk * per_chunk : (chunk + 1) * per_chunk], per_chunk


def needed_tokens(group: Group, end: int) -> range:
    """Tokens whose KV must be there so that the token at `end` can be computed."""
    match group.kind:
        case "full":
            return range(end)
        case "window":
            return range(max(0, end - group.window_tokens), end)
        case "state":
            return range(end - 1, end)


@settings(max_examples=400, deadline=None)
@given(options(), st.integers(1, 8), st.data())
def test_a_retrieve_writes_what_is_needed_and_not_held_and_nothing_else(
    shape: Options, chunks: int, data: st.DataObject
) -> None:
    end = chunks * shape.chunk_tokens
    step = max(group.block_tokens for group in shape.groups)
    hbm = step * data.draw(st.integers(0, (end - 1) // step))
    tables = full_tables(shape, end + 3)
    blocks, refused = retrieve_blocks(shape, tables, hbm_tokens=hbm, end_tokens=end)
    assert refused == ""
    written = {(item.group, item.first_block + at) for item in blocks for at in range(len(item.block_ids))}
    wanted = {
        (index, token // group.block_tokens)
        for index, group in enumerate(shape.groups)
        for token in needed_tokens(group, end)
        if token >= hbm
    }
    assert written == wanted
    for item in blocks:
        first, last = item.first_block, item.first_block + len(item.block_ids)
        assert list(item.block_ids) == tables[item.group][first:last]


@settings(max_examples=400, deadline=None)
@given(options(), st.integers(0, 4), st.integers(1, 5), st.data())
def test_a_store_reads_whole_chunks_of_blocks_that_are_there(
    shape: Options, first: int, count: int, data: st.DataObject
) -> None:
    tables = full_tables(shape, (first + count) * shape.chunk_tokens)
    for table in tables:
        for at in data.draw(st.sets(st.integers(0, len(table) - 1), max_size=3)):
            table[at] = NULL
        del table[data.draw(st.integers(max(0, len(table) - 2), len(table))) :]
    end, blocks = store_blocks(shape, tables, first_chunk=first, end_chunk=first + count)
    assert first <= end <= first + count
    if end < first + count:
        held = [index for index, group in enumerate(shape.groups) if group.kind == "full"]
        next_chunks = [block_ids_of(shape, tables, index, end) for index in held]
        assert any(NULL in ids or len(ids) < size for ids, size in next_chunks), "it could have gone on"
    brought = {item.group: item for item in blocks}
    for index, group in enumerate(shape.groups):
        per_chunk = shape.chunk_tokens // group.block_tokens
        whole = []
        for chunk in range(first, end):
            ids, size = block_ids_of(shape, tables, index, chunk)
            if NULL not in ids and len(ids) == size:
                whole.append(chunk)
        if group.kind == "full":
            assert whole == list(range(first, end)), "a full group has every chunk"
        if index in brought:
            item = brought[index]
            last = item.first_block + len(item.block_ids)
            assert list(item.block_ids) == tables[index][item.first_block : last]
            assert item.first_block % per_chunk == 0
            assert last == end * per_chunk
            assert set(range(item.first_block // per_chunk, end)) <= set(whole)
        elif end > first:
            assert end - 1 not in whole or len(tables[index]) < end * per_chunk


@settings(max_examples=300, deadline=None)
@given(options(), st.integers(1, 60))
def test_something_is_left_to_compute(shape: Options, tokens: int) -> None:
    usable = usable_tokens(shape, tokens)
    assert usable <= (tokens if shape.engine_steps_back and shape.is_plain else tokens - 1)
    assert chunks_to_look_up(shape, tokens) * shape.chunk_tokens <= tokens
    if not shape.is_plain:
        assert usable == chunks_to_look_up(shape, tokens) * shape.chunk_tokens, "only boundaries are of use"

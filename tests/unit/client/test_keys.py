"""Keys and namespaces: golden values that show a change of any byte of the formulas, equal in every process."""

import hashlib
import os
import random
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvclient import RequestError, chunk_keys, key_from_text, key_to_text, keys_from_block_hashes, namespace_digest
from kvclient.keys import LONG_TOKENS, PIECE_TOKENS, PIECES, Algorithm, Namer, Naming
from kvserver._native import sha256

TOKENS = [7, 0, 4_294_967_295, 151_643, 9, 11, 13, 2, 5]
FACTS = {
    "model": b"\x00\x01",
    "dtype": "bfloat16",
    "layers": 61,
    "rope": 1e6,
    "fp8": True,
    "grid": {"tp": 8, "pp": 1, "dcp": None},
    "shapes": [(8, 128), ()],
    "wärme": -3,
}


def reference_keys(tokens: list[int], chunk_tokens: int, extra: bytes = b"") -> list[bytes]:
    """The docstring's formula, spelled out."""
    key = hashlib.sha256(b"kvserver.chain.1\0" + struct.pack("<Q", chunk_tokens) + extra).digest()
    keys = []
    for start in range(0, len(tokens) // chunk_tokens * chunk_tokens, chunk_tokens):
        key = hashlib.sha256(key + struct.pack(f"<{chunk_tokens}I", *tokens[start : start + chunk_tokens])).digest()
        keys.append(key)
    return keys


# ---------------------------------------------------------------- chains


def test_golden_keys() -> None:
    assert chunk_keys(TOKENS, 4).hex() == (
        "6a325643f457b428c5000f1201b93c97cb1d268e889b7053fa8f4e1e3f0393be"
        "35cc06d1766bdefd8eb7c615bdd43f6a63ba0c750ec9dd74fbeae291a14e8033"
    )
    assert chunk_keys(TOKENS, 4, algorithm="blake3", extra=b"salt").hex() == (
        "ba1747a337daa041ab881679d7b2db3e54c00db42069407978eba4ff43cb227f"
        "8474c82195895cbed0f48da4f208c9d31cf40d6a51821cb9fe287c91490c6f97"
    )
    hashes = [bytes([number]) * 32 for number in range(7)]
    assert keys_from_block_hashes(hashes, 3, extra=b"x").hex() == (
        "eedf8fade58ad8f20802f5d497553d4a4d0330573cea6376a47076a16e209c1d"
        "e0904e9733d8070356ad82be00b66239e828dd0162b7316213c580a28ab01220"
    )
    assert namespace_digest(FACTS).hex() == "0f884d6a91f7b72382ae8a707ece000b61a0e386e51921c383f2d0e498edd378"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(1, 9), st.binary(max_size=5))
def test_keys_follow_the_formula(tokens: list[int], chunk_tokens: int, extra: bytes) -> None:
    assert chunk_keys(tokens, chunk_tokens, extra=extra) == b"".join(reference_keys(tokens, chunk_tokens, extra))


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_chain_can_be_continued_from_its_last_key(algorithm: Any) -> None:
    tokens = list(range(33))
    whole = chunk_keys(tokens, 5, algorithm=algorithm, extra=b"lora")
    head = chunk_keys(tokens[:10], 5, algorithm=algorithm, extra=b"lora")
    assert head + chunk_keys(tokens[10:], 5, algorithm=algorithm, parent=head[-32:]) == whole


def test_key_names_the_whole_prefix() -> None:
    one, other = list(range(20)), list(range(20))
    other[0] = 99
    ours, theirs = chunk_keys(one, 4), chunk_keys(other, 4)
    assert all(ours[at : at + 32] != theirs[at : at + 32] for at in range(0, len(ours), 32))


def test_extra_and_chunk_size_change_every_key() -> None:
    keys = {chunk_keys(TOKENS, 4), chunk_keys(TOKENS, 4, extra=b"a"), chunk_keys(TOKENS, 4, extra=b"b")}
    assert len(keys) == 3
    assert chunk_keys([1, 2, 3, 4], 2)[:32] != chunk_keys([1, 2, 3, 4], 4)[:32]


def test_partial_chunk_has_no_key() -> None:
    assert chunk_keys(TOKENS[:3], 4) == b""
    assert chunk_keys([], 4) == b""
    assert len(chunk_keys(TOKENS, 4)) == 2 * 32


@pytest.mark.parametrize(
    "kind", [tuple, lambda ids: array("I", ids), lambda ids: array("q", ids), lambda ids: array("L", ids)]
)
def test_every_kind_of_sequence_gives_the_same_keys(kind: Any) -> None:
    assert chunk_keys(kind(TOKENS), 4) == chunk_keys(TOKENS, 4)
    assert chunk_keys(memoryview(array("q", [n for token in TOKENS for n in (token, 1)]))[::2], 4) == chunk_keys(
        TOKENS, 4
    )
    assert chunk_keys(memoryview(array("I", [n for token in TOKENS for n in (token, 1)]))[::2], 4) == chunk_keys(
        TOKENS, 4
    )


def test_long_prompt_is_hashed_chunk_by_chunk() -> None:
    tokens = random.Random(3).choices(range(2**17), k=131_077)
    keys = chunk_keys(tokens, 256)
    assert len(keys) == 512 * 32
    assert keys == b"".join(reference_keys(tokens, 256))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], 0), {}, "chunk_tokens=0 must be at least 1"),
        (([-1, 2], 2), {}, r"token ids must be integers in \[0, 2\^32\)"),
        ((array("i", [-1, 2]), 2), {}, r"token ids must be integers in \[0, 2\^32\)"),
        (([2**32], 1), {}, r"token ids must be integers in \[0, 2\^32\)"),
        (([1.5], 1), {}, r"token ids must be integers in \[0, 2\^32\)"),
        ((b"\1\2", 1), {}, "bytes given; expected token ids"),
        (("12", 1), {}, "str given; expected token ids"),
        (([1], 1), {"algorithm": "md5"}, r"algorithm='md5' must be one of \['blake3', 'sha256'\]"),
        (([1], 1), {"parent": b"short"}, "5 bytes of parent; expected 32"),
        (([1], 1), {"parent": bytes(32), "extra": b"x"}, "extra goes into the start of a chain"),
    ],
)
def test_what_cannot_be_a_chain_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chunk_keys(*arguments, **options)


def test_a_prompt_is_named_alike_whoever_hashes_it() -> None:
    namer = Namer()
    for tokens in (0, 5, 255, LONG_TOKENS - 1, LONG_TOKENS, 20_011):
        ids = random.Random(tokens).choices(range(2**32), k=tokens)
        begun = [namer.begin(ids, 256, extra=b"lora") for _ in range(3)]
        assert {isinstance(item, bytes) for item in begun} == {tokens < LONG_TOKENS}
        named = [item if isinstance(item, bytes) else item.keys() for item in begun]
        assert named == [b"".join(reference_keys(ids, 256, b"lora"))] * 3
        assert all(isinstance(item, bytes) or item.ready for item in begun)


@pytest.mark.parametrize(
    ("tokens", "of_ids", "of_hashes"),
    [
        (
            2047,
            "8c024375faad0646bc0596cc14cae8cd495d3cc4075f79b8d2e5a39242c9c68b",
            "b637accf296a52c8688fa048e3949bec0fe68c9e9ad3de16e59c00a37a3a4cd6",
        ),
        (
            2048,
            "cb800e195e25caf0f0cd025b2c2f537c016a00ee80f63aa4638d0d22c5449803",
            "8230adef45259b98170671368c75c3de6cdbbdea188de51223314c7ba5d23b94",
        ),
        (
            32_768,
            "04a6e0fe6030e5e5457b6c72a943c34ab18d46e88dce19a48f95ebfa4c9f86bf",
            "b7b5110877079e800fd707a4c3bfae2f16dee01e5fa835344bf848fd9b986034",
        ),
        (
            100_003,
            "bbb31f2d743dc0fdc589ffafd09510b55f4d94386f180a4033fdab956ec81cf7",
            "0dd058fbab4aca201eedd44ae7452d819235e19652b97fc22212f093ce5e69ab",
        ),
    ],
)
def test_golden_keys_of_long_prompts(tokens: int, of_ids: str, of_hashes: str) -> None:
    """Values from when the caller hashed prompts below 16K tokens: chunks stored then are still found."""
    ids = [number * 2_654_435_761 % 2**32 for number in range(tokens)]
    hashes = [hashlib.sha256(block.to_bytes(4, "little")).digest() for block in range(tokens // 16)]
    begun = Namer().begin(ids, 256, extra=b"lora")
    named = [
        begun if isinstance(begun, bytes) else begun.keys(),
        keys_from_block_hashes(hashes, 16, extra=b"lora"),
    ]
    assert [hashlib.sha256(keys).hexdigest() for keys in named] == [of_ids, of_hashes]


@pytest.mark.parametrize("tokens", [LONG_TOKENS, PIECE_TOKENS, PIECE_TOKENS + 256, 20_011, 100_003])
def test_a_long_prompt_is_copied_in_a_few_pieces_and_then_named_by_somebody_else(tokens: int) -> None:
    ids = random.Random(tokens).choices(range(2**32), k=tokens)
    naming = Namer().begin(ids, 256)
    assert isinstance(naming, Naming)
    whole_pieces = -(-(tokens // 256 * 256) // PIECE_TOKENS)
    pieces = 1
    while not naming.ready and pieces < min(whole_pieces, PIECES):
        assert not naming.wait(0.0)
        is_last = naming.go_on()
        pieces += 1
        assert is_last == (pieces == min(whole_pieces, PIECES))
    assert naming.go_on()
    ids_then, ids[:] = list(ids), [0] * tokens  # the ids are not read any more
    assert naming.wait(10)
    assert naming.ready
    assert naming.keys() == chunk_keys(ids_then, 256)


def test_a_naming_ends_also_where_its_thread_is_gone() -> None:
    ids = list(range(LONG_TOKENS * 9))
    namer = Namer()
    begun = [namer.begin(ids, 256) for _ in range(30)]
    del namer  # the thread never begins the rest
    assert {item if isinstance(item, bytes) else item.keys() for item in begun} == {chunk_keys(ids, 256)}


def test_a_child_after_fork_names_and_ends_without_its_parents_thread() -> None:
    """The child's namer has no thread; the child must still name prompts and end normally."""
    script = f"""
import os, time
from kvclient.keys import Namer
ids = list(range({LONG_TOKENS}))
namer = Namer()
begun = namer.begin(ids, 256)
while not begun.ready:
    time.sleep(0.001)
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert namer.begin(ids, 256).keys() == begun.keys()
del namer
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, stdin=subprocess.DEVNULL)


def test_a_child_names_prompts_whatever_its_parents_thread_was_doing() -> None:
    """The thread may hold the queue's lock at the instant of a fork, and the child's copy stays locked."""
    script = """
import os, select, signal
from kvserver._native import Namer, Tokens
ids = list(range(7))

def copied():
    tokens = Tokens(len(ids))
    tokens.add(ids, len(ids))
    return tokens

namer = Namer()
forks_while_naming = 0
while forks_while_naming < 50:
    namings = [namer.name(tokens, 7, bytes(32)) for tokens in [copied() for _ in range(2000)]]
    child = os.fork()
    if not child:
        namer.name(copied(), 7, bytes(32)).keys()
        os._exit(0)
    forks_while_naming += not namings[-1].ready
    ended = os.pidfd_open(child)
    hangs = not select.select([ended], [], [], 30)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    os.waitpid(child, 0)
    assert not hangs
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdin=subprocess.DEVNULL)


def test_a_prompt_is_named_while_nobody_waits_for_it() -> None:
    namer = Namer()
    naming = namer.begin(list(range(LONG_TOKENS)), 256)
    assert not isinstance(naming, bytes)
    due_s = time.monotonic() + 10
    while not naming.ready:
        assert time.monotonic() < due_s
        time.sleep(0.001)
    assert naming.keys() == chunk_keys(list(range(LONG_TOKENS)), 256)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**64, -(2**70), 1.5, "1", None])
@pytest.mark.parametrize("place", [0, 4001, 20_000])
def test_a_long_prompt_of_anything_else_is_refused_when_its_keys_are_wanted(wrong: Any, place: int) -> None:
    ids = [*range(place), wrong, *range(place, 20_224)]
    naming = Namer().begin(ids, 256)
    assert isinstance(naming, Naming)
    while not naming.go_on():
        assert not naming.ready
    assert naming.ready
    with pytest.raises(RequestError, match=r"token ids must be integers in \[0, 2\^32\)"):
        naming.keys()


class Index:
    """An integer type of another library."""

    def __index__(self) -> int:
        return 7


def test_a_long_prompt_of_other_integers_has_the_same_keys() -> None:
    ids: list[Any] = list(range(LONG_TOKENS))
    ids[7] = Index()
    naming = Namer().begin(ids, 256)
    assert isinstance(naming, Naming)
    assert naming.keys() == chunk_keys(list(range(LONG_TOKENS)), 256)


def test_ids_of_every_size_are_read() -> None:
    values = (0, 1, 2**15, 2**30 - 1, 2**30, 2**31, 2**32 - 1)
    assert chunk_keys(list(values), 1) == chunk_keys(array("I", values), 1)
    assert chunk_keys([True, *values], 1) == chunk_keys([1, *values], 1)


@pytest.mark.parametrize("portable", [False, True])
def test_sha256_is_sha256(portable: bool) -> None:
    """FIPS 180-4's examples, and every length around a block and its padding."""
    known = {
        b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
        ),
    }
    assert {text: sha256(text, portable=portable).hex() for text in known} == known
    for length in [*range(200), 1061, 4096]:
        text = random.Random(length).randbytes(length)
        assert sha256(text, portable=portable) == hashlib.sha256(text).digest()


# ---------------------------------------------------------------- engine block hashes


def test_the_hash_of_its_last_block_is_the_key_of_a_chunk() -> None:
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
    assert keys_from_block_hashes(hashes, 3) == hashes[2] + hashes[5]
    assert keys_from_block_hashes(hashes[:2], 3) == b""


@given(
    st.integers(0, 40), st.integers(1, 9), st.binary(max_size=3), st.booleans(), st.sampled_from(["sha256", "blake3"])
)
def test_block_hashes_are_named_alike_whatever_holds_them(
    blocks: int, per_chunk: int, extra: bytes, is_list: bool, algorithm: Algorithm
) -> None:
    hashes = [random.Random(block).randbytes(32) for block in range(blocks)]
    given = hashes if is_list else tuple(hashes)
    head = b"kvserver.block-hash.1\0" + struct.pack("<QQ", per_chunk, len(extra)) + extra
    hashed = {"sha256": hashlib.sha256, "blake3": blake3}[algorithm]
    expected = [hashed(head + last).digest() if extra else last for last in hashes[per_chunk - 1 :: per_chunk]]
    assert keys_from_block_hashes(given, per_chunk, extra=extra, algorithm=algorithm) == b"".join(expected)


@pytest.mark.parametrize("extra", [b"", b"x"])
@pytest.mark.parametrize("wrong", [8, 16, 31, 33])
def test_block_hashes_of_other_lengths_are_refused(wrong: int, extra: bytes) -> None:
    with pytest.raises(RequestError, match=rf"block hashes of \[{wrong}\] bytes; only 32 bytes"):
        keys_from_block_hashes([bytes(32), bytes(32), bytes(wrong), bytes(wrong)], 3, extra=extra)
    with pytest.raises(RequestError, match="blocks_per_chunk=0"):
        keys_from_block_hashes([bytes(32)], 0)


# ---------------------------------------------------------------- namespaces


def test_namespace_does_not_depend_on_order_or_on_list_or_tuple() -> None:
    assert namespace_digest({"b": [1, 2], "a": 1}) == namespace_digest({"a": 1, "b": (1, 2)})


def test_namespaces_that_look_alike_differ() -> None:
    alike: list[dict[str, object]] = [
        {"a": 1},
        {"a": True},
        {"a": "1"},
        {"a": b"1"},
        {"a": 1.0},
        {"a": [1]},
        {"a": {"1": 1}},
        {"a": None},
        {"a": "None"},
        {"a": False},
        {"a": 0},
        {"a": ""},
        {"a": b""},
        {"a": []},
        {"a": {}},
        {"a": ["ab", "c"]},
        {"a": ["a", "bc"]},
        {"a": [["a"], "bc"]},
        {"a": 1, "b": 2},
        {"ab": 1},
        {"a": -1},
        {"a": 10**40},
    ]
    assert len({namespace_digest(facts) for facts in alike}) == len(alike)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "an empty namespace"),
        ({"dtype": float}, r"namespace\.dtype is a type; expected None, bool, int"),
        ({"a": [1, {"b": {3}}]}, r"namespace\.a\[1\]\.b is a set"),
        ({"a": {1: 2}}, r"namespace\.a has the key 1; keys must be str"),
        ({"a": float("nan")}, r"namespace\.a is not a number"),
    ],
)
def test_facts_without_one_spelling_are_refused(facts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        namespace_digest(facts)


def test_facts_without_an_end_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="nested deeper than 32"):
        namespace_digest({"a": endless})


# ---------------------------------------------------------------- text, processes


@given(st.binary(min_size=32, max_size=32))
def test_key_survives_the_way_to_text_and_back(key: bytes) -> None:
    assert key_from_text(key_to_text(key)) == key


@pytest.mark.parametrize("text", ["", "ab", "AB" * 32, " " + "ab" * 31 + "a", "ab" * 33, "gg" * 32, "ab" * 31 + "a\n"])
def test_every_other_spelling_of_a_key_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not 64 lower-case hexadecimal digits"):
        key_from_text(text)


def test_key_of_another_length_has_no_text() -> None:
    with pytest.raises(RequestError, match="31 bytes; a key has 32"):
        key_to_text(bytes(31))


def test_every_process_names_the_same_prompt_alike() -> None:
    code = (
        "import kvclient as k, test_keys as t; h = [bytes([n]) * 32 for n in range(7)];"
        "print(k.chunk_keys(t.TOKENS, 4).hex(), k.chunk_keys(t.TOKENS, 4, algorithm='blake3').hex(),"
        "k.keys_from_block_hashes(h, 3).hex(), k.namespace_digest(t.FACTS).hex(), hash('seed'))"
    )
    outputs = []
    for seed in ("1", "2", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parent,
        )
        outputs.append(done.stdout.split())
    assert outputs[0][:4] == outputs[1][:4] == outputs[2][:4]
    assert outputs[0][4] != outputs[1][4], "the seeds did make a difference to hash()"
    assert outputs[0][0] == chunk_keys(TOKENS, 4).hex()

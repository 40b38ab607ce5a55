"""Names of a request's chunks: equal content has equal names, and everything that changes the bytes changes them."""

import json
import os
import struct
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.keys import LONG_TOKENS
from kvclient.vllm import keys as vllm_keys
from kvclient.vllm.keys import Keyer, adapter_settings, names_media
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

CHUNK = 12


def request(tokens: int = 40, **more: object) -> Any:
    """A request with tokens 0, 1, …, and block hashes of 4 tokens each."""
    fields: dict[str, object] = {
        "request_id": "r",
        "all_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "block_hashes": [bytes([block % 256]) * 32 for block in range(tokens // 4)],
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.fixture(autouse=True)
def hashes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits long enough for hashes on a busy machine."""
    monkeypatch.setattr(vllm_keys, "ADAPTER_WAIT_S", 60)


def keyer(*, hashes: bool = False, adapters: str = "") -> Keyer:
    return Keyer(chunk_tokens=CHUNK, hash_block_tokens=4 if hashes else 0, adapters=adapters)


def keys_of(names: Keyer, asked: Any) -> bytes:
    return names.keys(asked, extra=names.extra(asked), parent=b"", first_chunk=0)


def feature(identifier: str, offset: int) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=3)
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=place)


def adapter(folder: Path, fill: int, *, id_: int = 1) -> SimpleNamespace:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes([fill]) * 5
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(lora_name="n", lora_path=str(folder), lora_int_id=id_)


@pytest.mark.parametrize("hashes", [False, True])
def test_chunks_are_named_whole_and_further_ones_go_on(hashes: bool) -> None:
    names, whole, short = keyer(hashes=hashes), request(40), request(25)
    keys = keys_of(names, whole)
    assert len(keys) == 3 * KEY_BYTES
    assert keys_of(names, short) == keys[: 2 * KEY_BYTES]
    extra = names.extra(whole)
    assert names.keys(whole, extra=extra, parent=keys[KEY_BYTES : 2 * KEY_BYTES], first_chunk=2) == keys[-KEY_BYTES:]
    assert names.keys(whole, extra=extra, parent=keys[-KEY_BYTES:], first_chunk=3) == b""


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("tokens", [0, 11, 40, LONG_TOKENS + 7, 20_011])
def test_a_request_that_begins_has_the_names_that_it_has_later(hashes: bool, tokens: int) -> None:
    names = keyer(hashes=hashes)
    blocks = [block.to_bytes(32, "big") for block in range(tokens // 4)]
    asked = request(tokens, prompt_token_ids=list(range(tokens)), block_hashes=blocks)
    begun = names.begin(asked, extra=names.extra(asked))
    assert isinstance(begun, bytes) == (hashes or tokens < LONG_TOKENS)
    keys = begun if isinstance(begun, bytes) else begun.keys()
    assert len(keys) == tokens // CHUNK * KEY_BYTES
    assert keys == keys_of(names, asked)


@pytest.mark.parametrize("hashes", [False, True])
def test_a_prompt_of_tokens_and_embeddings_has_no_safe_name(hashes: bool) -> None:
    """vLLM hashes 0 in place of an embedding's token, and 0 is a real token as well."""
    with pytest.raises(RequestError, match="prompt-embeds"):
        keyer(hashes=hashes).extra(request(prompt_embeds=object(), prompt_is_token_ids=[True, False]))


def test_the_two_ways_to_name_never_meet() -> None:
    assert keys_of(keyer(), request()) != keys_of(keyer(hashes=True), request())


def test_what_changes_the_bytes_changes_every_name(tmp_path: Path) -> None:
    names = keyer()
    asked = [
        request(),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(mm_features=[feature("x", 3)]),
        request(mm_features=[feature("y", 3)]),
        request(mm_features=[feature("x", 4)]),
        request(mm_features=[feature("x", 3)], cache_salt="a"),
        request(lora_request=adapter(tmp_path / "one", 1)),
        request(lora_request=adapter(tmp_path / "two", 2, id_=2)),
    ]
    found = [keys_of(names, item) for item in asked]
    for chunk in range(3):
        assert len({keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES] for keys in found}) == len(asked)


def test_an_image_changes_the_names_from_its_chunk_on() -> None:
    names = keyer()
    one, two, three = (
        keys_of(names, request(48, mm_features=[feature("x", 3), *more]))
        for more in ([], [feature("y", 29)], [feature("y", 29), feature("z", 40)])
    )
    shared = [
        sum(a[at : at + KEY_BYTES] == b[at : at + KEY_BYTES] for at in range(0, len(a), KEY_BYTES))
        for a, b in ((one, two), (two, three))
    ]
    assert shared == [2, 3]
    assert keys_of(names, request(48)) not in (one, two)


def test_an_image_over_the_edge_of_a_chunk_is_in_both() -> None:
    names = keyer()
    one, two = (keys_of(names, request(mm_features=[feature(name, 11)])) for name in "xy")
    assert one[:KEY_BYTES] != two[:KEY_BYTES]
    longer = request(mm_features=[feature("x", 11)])
    extra = names.extra(longer)
    assert names.keys(longer, extra=extra, parent=one[:KEY_BYTES], first_chunk=1) == one[KEY_BYTES:]
    other = request(mm_features=[feature("y", 11)])
    assert names.keys(other, extra=extra, parent=one[:KEY_BYTES], first_chunk=1) != one[KEY_BYTES:]


def test_an_image_that_begins_or_ends_at_the_edge_of_a_chunk_is_in_one() -> None:
    names, plain = keyer(), request(48)
    text = keys_of(names, plain)
    for offset, shared in ((12, 1), (24, 2), (21, 1)):
        image = request(48, mm_features=[feature("x", offset)])
        found = keys_of(names, image)
        same = [found[at : at + KEY_BYTES] == text[at : at + KEY_BYTES] for at in range(0, len(text), KEY_BYTES)]
        assert same == [True] * shared + [False] * (4 - shared), "what comes before it is shared, also with text alone"
        rest = [names.keys(asked, extra=b"", parent=text[:KEY_BYTES], first_chunk=2) for asked in (image, plain)]
        assert (rest[0] == rest[1]) == (offset != 24), "what comes behind it is told by the key before alone"


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_what_lies_before_an_image_is_named_as_in_a_request_without(salt: str) -> None:
    names = keyer()
    text, image = (request(48, cache_salt=salt, mm_features=features) for features in ([], [feature("x", 30)]))
    assert keys_of(names, image)[: 2 * KEY_BYTES] == keys_of(names, text)[: 2 * KEY_BYTES]
    assert keys_of(names, image)[2 * KEY_BYTES :] != keys_of(names, text)[2 * KEY_BYTES :]


@pytest.mark.parametrize("hashes", [False, True])
def test_an_adapter_is_told_by_content_and_not_by_place(tmp_path: Path, hashes: bool) -> None:
    one, copy, other = (adapter(tmp_path / name, fill) for name, fill in (("a", 1), ("b", 1), ("c", 2)))
    found = [keys_of(keyer(hashes=hashes), request(lora_request=lora)) for lora in (one, copy, other)]
    assert found[0] == found[1] != found[2]


def test_an_adapter_that_changes_under_its_name_has_none_any_more(tmp_path: Path) -> None:
    names, lora = keyer(), adapter(tmp_path / "a", 1)
    first = keys_of(names, request(lora_request=lora))
    assert keys_of(names, request(lora_request=lora)) == first
    adapter(tmp_path / "a", 2)
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    with pytest.raises(RequestError, match="changed"):
        names.extra(request(lora_request=lora))
    elsewhere = adapter(tmp_path / "b", 2, id_=2)
    assert keys_of(names, request(lora_request=elsewhere)) != first


def test_an_adapter_has_no_name_while_it_is_hashed_and_others_wait_for_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Future[bytes]] = []

    def begin(work: object) -> Future[bytes]:
        running.append(Future())
        return running[-1]

    monkeypatch.setattr(vllm_keys, "in_background", begin)
    monkeypatch.setattr(vllm_keys, "ADAPTER_WAIT_S", 0)
    names = keyer()
    adapters = [adapter(tmp_path / str(number), number, id_=number) for number in range(6)]
    for lora in adapters:
        with pytest.raises(RequestError, match="hashed"):
            names.extra(request(lora_request=lora))
    assert len(running) == vllm_keys.ADAPTERS_HASHED_MAX < len(adapters)
    running[2].set_result(b"digest")
    running[3].set_exception(OSError("gone"))
    assert names.extra(request(lora_request=adapters[2]))
    for number, why in ((1, "being hashed"), (3, "gone"), (5, "being hashed")):
        with pytest.raises(RequestError, match=why):
            names.extra(request(lora_request=adapters[number]))
    assert len(running) == 5


def test_an_adapter_that_is_loaded_in_place_has_no_name_nor_has_its_id_from_then_on(tmp_path: Path) -> None:
    names, lora = keyer(), adapter(tmp_path / "a", 1)
    assert names.extra(request(lora_request=lora))
    for in_place in (True, False):
        lora.load_inplace = in_place
        with pytest.raises(RequestError, match="in place"):
            names.extra(request(lora_request=lora))


def test_an_adapter_under_the_id_of_another_has_no_name(tmp_path: Path) -> None:
    """vLLM computes with the adapter that it has under that id, until it needs the room."""
    names, one, two = keyer(), adapter(tmp_path / "a", 1), adapter(tmp_path / "b", 2)
    first = keys_of(names, request(lora_request=one))
    with pytest.raises(RequestError, match="lora_int_id=1"):
        names.extra(request(lora_request=two))
    assert keys_of(names, request(lora_request=one)) == first
    two.lora_int_id = 2
    assert keys_of(names, request(lora_request=two)) != first


def test_what_an_engine_makes_of_an_adapter_changes_the_names_of_its_requests_and_no_others(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", 1)
    engines = [keyer(), *(keyer(adapters=said) for said in ("q_proj", "o_proj"))]
    assert len({keys_of(names, request(lora_request=lora)) for names in engines}) == 3
    assert len({keys_of(names, request()) for names in engines}) == 1
    fused = adapter(tmp_path / "a", 1)
    fused.is_3d_lora_weight = True
    assert keys_of(keyer(), request(lora_request=fused)) != keys_of(keyer(), request(lora_request=lora))


def test_what_an_engine_makes_of_adapters_is_where_and_how_exactly_they_are_applied() -> None:
    def said(**more: object) -> str:
        return adapter_settings(
            SimpleNamespace(**{"lora_dtype": "bfloat16", "target_modules": None, "max_loras": 1, **more})
        )

    plain = said()
    assert plain == said(max_loras=8) != ""
    assert plain != said(target_modules=["q_proj"]) != said(target_modules=["o_proj"])
    assert said(target_modules=["a", "b"]) == said(target_modules=["b", "a"])
    assert len({plain, said(lora_dtype="float16"), said(enable_tower_connector_lora=True)}) == 3
    assert adapter_settings(None) == ""


def test_an_adapter_in_the_users_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    whole = adapter(tmp_path / "a", 1)
    home = SimpleNamespace(lora_name="n", lora_path="~/a", lora_int_id=1)
    assert keys_of(keyer(), request(lora_request=home)) == keys_of(keyer(), request(lora_request=whole))


def test_an_adapter_whose_tensors_lie_elsewhere_has_no_name(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", 1)
    lora.tensorizer_config_dict = {"tensorizer_dir": "/elsewhere"}
    with pytest.raises(RequestError, match="tensorizer"):
        keyer().extra(request(lora_request=lora))


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"prompt_embeds": object()}, "prompt-embeds"),
        ({"mm_features": [feature("", 0)]}, "multimodal"),
        ({"resumable": True}, "streaming"),
        ({"lora_request": SimpleNamespace(lora_name="n", lora_path="/nowhere", lora_int_id=1)}, "model-identity"),
    ],
)
def test_what_has_no_safe_name_is_refused(more: dict[str, object], code: str) -> None:
    with pytest.raises(RequestError) as refused:
        keyer().extra(request(**more))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("prefix_cache", "processor_cache_gb", "is_digest"),
    [(True, 4, True), (True, 0, True), (False, 4, True), (False, 0, False)],
)
def test_an_engine_without_any_cache_of_its_own_numbers_images_and_does_not_name_them(
    prefix_cache: bool, processor_cache_gb: int, is_digest: bool
) -> None:
    media = SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)
    cache = SimpleNamespace(enable_prefix_caching=prefix_cache)
    assert names_media(SimpleNamespace(multimodal_config=media), cache) == is_digest
    assert names_media(SimpleNamespace(multimodal_config=None), cache)


@pytest.mark.parametrize("hash_block_tokens", [0, 4])
def test_requests_with_an_image_have_no_name_where_images_are_only_numbered(hash_block_tokens: int) -> None:
    names = Keyer(chunk_tokens=CHUNK, hash_block_tokens=hash_block_tokens, names_media=False)
    with pytest.raises(RequestError, match="numbers"):
        names.extra(request(mm_features=[feature("renderer0-mm-0-image-0", 3)]))
    assert keys_of(names, request()) == keys_of(keyer(hashes=bool(hash_block_tokens)), request())


def test_after_a_reset_nothing_has_its_old_name_nor_one_of_another_engine() -> None:
    found = []
    for names in (keyer(), keyer()):
        for _ in range(3):
            names.reset()
            found.append(keys_of(names, request()))
            assert keys_of(names, request()) == found[-1]
    assert len({keys_of(keyer(), request()), *found}) == 7


def test_a_chunk_that_cuts_the_engines_blocks_is_refused() -> None:
    with pytest.raises(RequestError, match="hash_block_tokens=5"):
        Keyer(chunk_tokens=CHUNK, hash_block_tokens=5)

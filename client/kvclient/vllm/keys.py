"""Keys of a request's chunks. Everything in the request that changes its KV is in them; otherwise it has no keys.

Token ids identify a chunk's content. Adapter and salt start the chain. An image goes only into the chunks that contain
it, so that chunks before it are shared. If the engine's own block hashes are as good (256 bits, equal in every
process), they are used instead, because the engine has computed them already.
"""

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvclient.identity.file_hashes import Hashes, Seen
from kvclient.identity.late_namespaces import in_background
from kvclient.identity.model_files import adapter_files, adapter_looks, digest_of, settings_text
from kvclient.keys import Namer, Naming, chunk_keys, keys_from_block_hashes, namespace_digest
from kvserver.errors import RequestError


class Request(Protocol):
    """The attributes of vLLM's Request that are read."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: list[int] | None
    block_hashes: Sequence[bytes]
    lora_request: Any
    cache_salt: str | None

    @property
    def all_token_ids(self) -> Sequence[int]: ...


def names_media(model: Any, cache: Any) -> bool:
    """Whether vLLM identifies inputs other than text by content.

    Without a prefix cache and without a cache of processed inputs, vLLM numbers them from 0 in each process.
    """
    media = getattr(model, "multimodal_config", None)
    return bool(media is None or cache.enable_prefix_caching or media.mm_processor_cache_gb)


ADAPTER_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""LoRA settings of an engine that change an adapter's effect and are not in its files."""


def adapter_settings(lora_config: Any) -> str:
    """A LoRAConfig's settings as text. Empty for None."""
    if lora_config is None:
        return ""
    said = {name: getattr(lora_config, name, None) for name in ADAPTER_SETTINGS}
    return settings_text({**said, "target_modules": sorted(said["target_modules"] or ())})


ADAPTERS_HASHED_MAX = 4
"""Adapters hashed at once. Requests of any further adapter have no keys meanwhile."""
ADAPTER_WAIT_S = 0.25
"""How long an adapter's first request waits for the hash of its files. If hashing takes longer, its requests have no
keys until it is done. vLLM reads the same files for the same request, and takes longer."""


class _Adapter(NamedTuple):
    """An adapter that was used."""

    place: tuple[str, str]
    """Name and path."""
    looks: list[Seen]
    """Stat values of its files at first use."""
    digest: "Future[bytes]"


class Keyer:
    """Makes the keys of one engine's requests.

    hash_block_tokens: tokens per block hash of the engine; 0 to make keys from tokens.

    adapters: adapter_settings(). names_media: names_media(); if False, requests with media have no keys.
    """

    def __init__(
        self, *, chunk_tokens: int, hash_block_tokens: int, adapters: str = "", names_media: bool = True
    ) -> None:
        if hash_block_tokens and chunk_tokens % hash_block_tokens:
            raise RequestError(
                "chunk-tokens", f"{chunk_tokens=} must be a multiple of the engine's {hash_block_tokens=}"
            )
        self._chunk_tokens = chunk_tokens
        self._hash_block_tokens = hash_block_tokens
        self._names_media = names_media
        self._namer = Namer()
        self._life = b""
        """Part of all keys since the last reset. Random, because another engine may have the same name and life
        number."""
        self._adapter_settings = adapters
        self._adapters: dict[int, _Adapter | None] = {}
        """vLLM's adapter id -> adapter. None if it was loaded in place."""
        self._hashing: list[Future[bytes]] = []

    @property
    def takes_hashes(self) -> bool:
        """Whether keys are made from the engine's block hashes. Then begin() returns any prompt's keys at once."""
        return self._hash_block_tokens > 0

    def reset(self) -> None:
        """Make different keys from now on, because this engine's weights may have changed and no other engine knows."""
        self._life = secrets.token_bytes(16)

    def extra(self, request: Any) -> bytes:
        """Start of the request's key chain. RequestError says why the request cannot have keys."""
        facts: dict[str, object] = {}
        if self._life:
            facts["reset"] = self._life
        if request.lora_request is not None:
            facts["lora"] = self._adapter(request.lora_request)
        if getattr(request, "resumable", False):
            raise RequestError("streaming", "a streaming session changes its prompt after its keys were made")
        if not self._names_media and getattr(request, "mm_features", None):
            raise RequestError(
                "multimodal",
                "without any cache, vLLM numbers images and does not hash them",
            )
        if getattr(request, "prompt_is_token_ids", None) is not None:
            raise RequestError(
                "prompt-embeds",
                "vLLM's hash does not tell tokens from embeddings",
            )
        if not self._hash_block_tokens:
            facts |= _content_facts(request)
        return namespace_digest(facts) if facts else b""

    def begin(self, request: Request, *, extra: bytes) -> bytes | Naming:
        """Return a new request's keys, or a Naming that makes them in the background: hashing a long prompt takes a
        while."""
        prompt = request.prompt_token_ids
        is_plain = not self._hash_block_tokens and not getattr(request, "mm_features", None)
        if is_plain and isinstance(prompt, list) and len(prompt) == request.num_tokens:
            return self._namer.begin(prompt, self._chunk_tokens, extra=extra)
        return self.keys(request, extra=extra, parent=b"", first_chunk=0)

    def keys(self, request: Request, *, extra: bytes, parent: bytes, first_chunk: int) -> bytes:
        """Keys of all whole chunks from first_chunk on, output included. parent: the key before them."""
        if self._hash_block_tokens:
            blocks = self._chunk_tokens // self._hash_block_tokens
            hashes = request.block_hashes[first_chunk * blocks :] if first_chunk else request.block_hashes
            return keys_from_block_hashes(hashes, blocks, extra=extra)
        tokens = request.all_token_ids[first_chunk * self._chunk_tokens : request.num_tokens]
        features = getattr(request, "mm_features", None)
        if features:
            return self._keys_with_features(tokens, features, b"" if parent else extra, parent, first_chunk)
        return chunk_keys(tokens, self._chunk_tokens, extra=b"" if parent else extra, parent=parent)

    def _keys_with_features(
        self, tokens: Sequence[int], features: Sequence[Any], extra: bytes, parent: bytes, first_chunk: int
    ) -> bytes:
        """Keys of a request with media. Chunks before the first media input get the same keys as in a request without
        media."""
        keys = b""
        for chunk in range(len(tokens) // self._chunk_tokens):
            start = (first_chunk + chunk) * self._chunk_tokens
            inside = [fact for item in features if (fact := _feature(item, start, self._chunk_tokens))]
            if inside:
                extra, parent = b"", namespace_digest({"before": parent or extra, "features": inside})
            part = tokens[chunk * self._chunk_tokens : (chunk + 1) * self._chunk_tokens]
            extra, parent = b"", chunk_keys(part, self._chunk_tokens, extra=extra, parent=parent)
            keys += parent
        return keys

    def _adapter(self, lora: Any) -> list[object]:
        """Facts that identify an adapter by content, because a retrained adapter may keep its name and path.

        RequestError if its files changed since the first use, or if another adapter has its id. Only vLLM knows whether
        it has loaded the new files.
        """
        number, place = lora.lora_int_id, (lora.lora_name, lora.lora_path)
        if getattr(lora, "tensorizer_config_dict", None):
            raise RequestError("lora", "tensorizer reads the adapter from elsewhere than its path")
        if getattr(lora, "load_inplace", False):
            self._adapters[number] = None
        try:
            path = Path(lora.lora_path).expanduser()
            looks = adapter_looks(path)
            if number not in self._adapters:
                files = adapter_files(path)
                self._hashing = [running for running in self._hashing if not running.done()]
                if len(self._hashing) >= ADAPTERS_HASHED_MAX:
                    raise RequestError("lora", f"the files of {len(self._hashing)} other adapters are being hashed")
                digest = in_background(lambda: digest_of(files, Hashes()))
                self._hashing.append(digest)
                self._adapters[number] = _Adapter(place, looks, digest)
                wait([digest], ADAPTER_WAIT_S)
        except (OSError, RuntimeError) as problem:  # RuntimeError: the user has no home
            raise RequestError("lora", f"the adapter cannot be read: {problem}") from problem
        known = self._adapters[number]
        if known is None:
            raise RequestError("lora", "an adapter that is loaded in place changes and keeps its name")
        if place != known.place:
            raise RequestError("lora", f"lora_int_id={number} was adapter {known.place}, and vLLM may have that still")
        if looks != known.looks:
            raise RequestError("lora", f"the files of adapter {lora.lora_name!r} have changed: load it from a new path")
        if not known.digest.done():
            raise RequestError("lora", f"the files of adapter {lora.lora_name!r} are being hashed")
        if (why := known.digest.exception()) is not None:
            raise RequestError("lora", f"the files of adapter {lora.lora_name!r} have changed or are gone: {why!r}")
        return [known.digest.result().hex(), self._adapter_settings, bool(getattr(lora, "is_3d_lora_weight", False))]


def _content_facts(request: Any) -> dict[str, object]:
    """Facts that change the KV and are not tokens. The engine's block hashes include them already."""
    facts: dict[str, object] = {}
    if getattr(request, "prompt_embeds", None) is not None:
        raise RequestError("prompt-embeds", "a prompt of embeddings has no tokens")
    if request.cache_salt:
        facts["salt"] = request.cache_salt
    if not all(feature.identifier for feature in getattr(request, "mm_features", None) or ()):
        raise RequestError("multimodal", "an image or other media input has no digest")
    return facts


def _feature(feature: Any, start: int, chunk_tokens: int) -> list[object]:
    """A media input as seen from the chunk at token `start`. Empty if the input lies elsewhere."""
    offset, length = feature.mm_position.offset - start, feature.mm_position.length
    if offset >= chunk_tokens or offset + length <= 0:
        return []
    return [feature.modality, feature.identifier, offset, length]

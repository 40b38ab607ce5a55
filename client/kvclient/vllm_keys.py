"""Names of a request's chunks: everything of the request that changes its KV is in them, or it has no names.

Token ids say what a chunk holds; adapter and salt go into the start of the chain, an image into the chunks that it lies
in, so that what comes before it is shared. Where the engine's own block hashes are as good (256 bits, the same in every
process), they are taken instead: the engine has computed them already.
"""

import secrets
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvclient.file_hashes import Hashes, Seen
from kvclient.identity import adapter_files, adapter_looks, digest_of, settings_text
from kvclient.keys import Namer, Naming, chunk_keys, keys_from_block_hashes, namespace_digest
from kvclient.late_namespaces import in_background
from kvserver.errors import RequestError


class Request(Protocol):
    """What is read of vLLM's Request."""

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
    """Of a ModelConfig and a CacheConfig: whether inputs beside the text are identified by what they are.

    With neither a prefix cache nor one of processed inputs, vLLM numbers them, from 0 on in each process."""
    media = getattr(model, "multimodal_config", None)
    return bool(media is None or cache.enable_prefix_caching or media.mm_processor_cache_gb)


ADAPTER_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""What an engine does with an adapter that its files do not say."""


def adapter_settings(lora_config: Any) -> str:
    """Of a LoRAConfig, or of None, as text."""
    if lora_config is None:
        return ""
    said = {name: getattr(lora_config, name, None) for name in ADAPTER_SETTINGS}
    return settings_text({**said, "target_modules": sorted(said["target_modules"] or ())})


ADAPTERS_HASHED_MAX = 4
"""At once. Requests of another adapter have no name meanwhile."""
ADAPTER_WAIT_S = 0.25
"""What the first request of an adapter waits for its files to be hashed. Those of a larger one have no name until that
is done; vLLM reads the same files for the same request, and takes longer."""


class _Adapter(NamedTuple):
    """One that was used."""

    place: tuple[str, str]
    """Name and path."""
    looks: list[Seen]
    """Of its files then."""
    digest: "Future[bytes]"


class Keyer:
    """Keys of one engine's requests.

    hash_block_tokens: tokens behind one of the engine's block hashes; 0 to name chunks by their tokens.
    adapters: adapter_settings(). names_media: see there; without, requests with such inputs have no keys."""

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
        """Since the last reset; drawn, because an engine may have the name and the life's number of another."""
        self._adapter_settings = adapters
        self._adapters: dict[int, _Adapter | None] = {}
        """By id, which is what vLLM knows them by; None: it was loaded in place."""
        self._hashing: list[Future[bytes]] = []

    @property
    def takes_hashes(self) -> bool:
        """Whether chunks are named by the engine's block hashes: then begin() has the names of all prompts at once."""
        return self._hash_block_tokens > 0

    def reset(self) -> None:
        """From now on nothing that was named before is named again, by this engine alone: its weights may be others
        now, and nobody else knows."""
        self._life = secrets.token_bytes(16)

    def extra(self, request: Any) -> bytes:
        """What starts the request's chain. RequestError says why the request cannot be named."""
        facts: dict[str, object] = {}
        if self._life:
            facts["reset"] = self._life
        if request.lora_request is not None:
            facts["lora"] = self._adapter(request.lora_request)
        if getattr(request, "resumable", False):
            raise RequestError("streaming", "the prompt of a streaming session changes behind its keys")
        if not self._names_media and getattr(request, "mm_features", None):
            raise RequestError("multimodal", "an engine without any cache numbers its images, and does not name them")
        if getattr(request, "prompt_is_token_ids", None) is not None:
            raise RequestError("prompt-embeds", "of a prompt of tokens and embeddings vLLM hashes not which is which")
        if not self._hash_block_tokens:
            facts |= _content_facts(request)
        return namespace_digest(facts) if facts else b""

    def begin(self, request: Request, *, extra: bytes) -> bytes | Naming:
        """keys() of a request that is new, or what will have them soon: a long prompt takes a while to hash."""
        prompt = request.prompt_token_ids
        is_plain = not self._hash_block_tokens and not getattr(request, "mm_features", None)
        if is_plain and isinstance(prompt, list) and len(prompt) == request.num_tokens:
            return self._namer.begin(prompt, self._chunk_tokens, extra=extra)
        return self.keys(request, extra=extra, parent=b"", first_chunk=0)

    def keys(self, request: Request, *, extra: bytes, parent: bytes, first_chunk: int) -> bytes:
        """Of all whole chunks from first_chunk on, output included. parent: the key before them."""
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
        """Chunks in which none of the features lies are named as in a request that has none."""
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
        """By its content: an adapter that is trained on may keep its name and path. One that has changed since it was
        first used has no name any more, nor has another under its id: whether vLLM has loaded it again, only vLLM
        knows."""
        number, place = lora.lora_int_id, (lora.lora_name, lora.lora_path)
        if getattr(lora, "tensorizer_config_dict", None):
            raise RequestError("lora", "an adapter that is read by tensorizer is not in its path")
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
        except (OSError, RuntimeError) as problem:  # the latter: of a user who has no home
            raise RequestError("lora", f"the adapter cannot be read: {problem}") from problem
        known = self._adapters[number]
        if known is None:
            raise RequestError("lora", "an adapter that is loaded in place changes behind its name")
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
    """What is no token and changes the bytes; the engine's block hashes hold it already."""
    facts: dict[str, object] = {}
    if getattr(request, "prompt_embeds", None) is not None:
        raise RequestError("prompt-embeds", "a prompt of embeddings has no tokens")
    if request.cache_salt:
        facts["salt"] = request.cache_salt
    if not all(feature.identifier for feature in getattr(request, "mm_features", None) or ()):
        raise RequestError("multimodal", "an input beside the text has no digest")
    return facts


def _feature(feature: Any, start: int, chunk_tokens: int) -> list[object]:
    """Of an input beside the text, as the chunk at token `start` sees it; empty if it lies elsewhere."""
    offset, length = feature.mm_position.offset - start, feature.mm_position.length
    if offset >= chunk_tokens or offset + length <= 0:
        return []
    return [feature.modality, feature.identifier, offset, length]

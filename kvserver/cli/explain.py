"""`kvserver explain`: prints in sentences why a running server does or does not serve a prompt or a chunk."""

from typing import TYPE_CHECKING

from kvclient.keys import chunk_keys
from kvserver.cli import values
from kvserver.errors import ConfigError
from kvserver.wire.explanation import Explanation
from kvserver.wire.messages import CHUNKS_MAX, KEY_BYTES

if TYPE_CHECKING:
    from kvclient.client import Client

ENDINGS = {
    "whole": "all of it is held",
    "absent": "the next chunk is not known here: it was never stored, or left long ago",
    "gone": "the next chunk has left",
    "writing": "the next chunk is being stored, by some rank not yet",
    "partial": "the next chunk is held, but a window or state group that the boundary needs is not",
    "declined": "the rest is on disk, and reading it would take longer than computing it (recompute_tokens_per_s), or "
    "its tenant may not have a chunk of it in DRAM (tenants)",
    "disk-away": "the rest is on disk, which cannot be read now",
    "namespace": "nothing was ever registered here under this namespace",
    "recovering": "the rest may be on disk: the server has started a moment ago, and does not know yet what is there",
}
CAUSES = {
    "store": "it made room in DRAM for a store, and was not on disk",
    "promote": "it made room in DRAM for what was read from disk, and was not on disk itself",
    "index": "the index was full (chunks_max)",
    "disk": "it was on disk alone, and made room there or had no place when its device was drained",
    "lost": "it, or a chunk before it, could not be read from disk",
    "digest": "it, or a chunk before it, had other bytes than were stored (kvserver_digest_mismatches_total)",
    "died": "whoever stored it died",
    "failed": "its copy failed",
    "abandoned": "its client gave the store up",
    "deadline": "not every rank stored its part in time (reserve_ttl_ms)",
    "cleared": "its namespace was cleared",
}
REMOTE = {
    "unusable": "is not usable now (kvserver status says why)",
    "clear-owed": "has not confirmed a Clear of this namespace: nothing of it is read or written until then",
    "unknown": "has not told lately which chunks of this namespace count: nothing of it is read or written until then",
    "queued": "is to get it: it waits to be written",
    "probing": "is being asked for it",
    "reading": "has it: it is read now, or after those before it",
    "aside": "did not have it, or it could not be read, or was not wanted (docs/remote.md); it is not asked for again",
    "unannounced": "is not asked for it, because no server has announced that it is there",
    "unasked": "has not been asked for it lately. A lookup asks for it, if it would bring tokens_min tokens",
}


def explain(client: "Client", *, keys: list[str], tokens: str, namespace: str) -> list[str]:
    """The lines to print. Raises ConfigError unless either keys or tokens are given.

    tokens: a file of token ids; their keys depend on the chunk size of each namespace.
    namespace: its first digits are enough; empty: all."""
    if bool(keys) == bool(tokens):
        raise ConfigError("explain", "name keys, or a file of token ids with --tokens, and not both")
    token_ids = values.tokens(tokens) if tokens else []
    named = b"".join(map(values.key, keys))
    known = [each for each in client.explain(b"") if each.namespace.startswith(namespace)]
    if not known and len(namespace) == 2 * KEY_BYTES:
        known = client.explain(b"", values.key(namespace))
    lines: list[str] = []
    for space in known:
        packed = named
        if tokens and not space.chunk_tokens:
            lines += [f"namespace {space.namespace}", f"  {ENDINGS['namespace']}"]
            continue
        if tokens:
            packed = chunk_keys(token_ids, space.chunk_tokens)
        if not packed:
            lines.append(f"{space.namespace}: {len(token_ids)} tokens are less than a chunk of {space.chunk_tokens}")
            continue
        for found in client.explain(packed[: CHUNKS_MAX * KEY_BYTES], values.key(space.namespace)):
            lines += sentences(found)
    return lines or ["no namespace of that name is known to the server: no engine has registered a cache under it"]


def sentences(found: Explanation) -> list[str]:
    each = found.chunk_tokens
    disk = f", {found.chunks_on_disk} of them from disk" if found.chunks_on_disk else ""
    asked = f"{found.chunks_asked} chunks of {each} tokens" if each else f"{found.chunks_asked} chunks"
    lines = [
        f"namespace {found.namespace}",
        f"  {found.chunks} of {asked} would be served{disk}: {found.chunks * each} tokens",
        f"  {ENDINGS.get(found.why, found.why)}",
    ]
    if found.key:
        lines.append(f"  next chunk {found.key}")
    if found.cause:
        lines.append(f"  it left {found.gone_s:.1f} s ago: {CAUSES.get(found.cause, found.cause)}")
    stores = {"": (found.remote, found.remote_s)} if found.remote else found.remotes
    for name, (why, rest_s) in stores.items():
        rest = f" for {rest_s:.1f} s" if rest_s else ""
        lines.append(f"  the remote store {f'{name} ' if name else ''}{REMOTE.get(why, why)}{rest}")
    if found.producer:
        lines.append(
            f"  engine {found.producer} computes it now, and others wait for it for another {found.producer_s:.1f} s"
        )
    if found.held_in:
        lines.append(
            f"  the same key is held in namespace {', '.join(found.held_in)}: engines that should share differ"
        )
    return lines

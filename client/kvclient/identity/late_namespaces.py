"""Namespaces that arrive later than their caches, because hashing a model's weights must not delay an engine's start.

Facts are known when a cache is registered. A thread computes the digests of the model's files. Until they are there,
nothing is stored and every lookup is a miss. All ranks of an engine get the same namespace, because they see the same
files and apply the same rule (file_times.py).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from kvclient.identity.file_hashes import Changed, Hashes, Seen
from kvclient.identity.file_times import Doubt, doubt, is_blob
from kvclient.identity.model_files import ModelFiles, digest_of
from kvclient.keys import namespace_digest

T = TypeVar("T")
NICE = 10
"""Priority of threads that hash. The engine's computation comes first."""


def in_background(work: Callable[[], T]) -> "Future[T]":
    """Run `work` in a thread of its own. The end of the process does not wait for it."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def run() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            result = work()
        except BaseException as problem:  # handed on through the future
            answer.set_exception(problem)
        else:
            answer.set_result(result)

    threading.Thread(target=run, name="kvserver-hash", daemon=True).start()
    return answer


def namespace_of(
    facts: Mapping[str, object],
    models: Sequence[ModelFiles],
    *,
    life: str,
    log: logging.Logger,
    is_first: bool,
    since_ns: int,
    hashes: Callable[[], Hashes] = Hashes,
) -> "Future[bytes]":
    """The namespace of the facts and of these models' files. Available at once if there are no models.

    life: the engine's life, the same in all its ranks. If the files do not tell which weights were loaded, it makes the
    namespace unique. is_first: this rank writes the log for all ranks.

    since_ns: start of the process that loads the models, or of an earlier process. The same in all ranks.
    """
    if not models:
        done: Future[bytes] = Future()
        done.set_result(namespace_digest(dict(facts)))
        return done
    saying = log if is_first else _silent

    def name() -> bytes:
        found, why = _digests(models, hashes(), saying, since_ns)
        if not why:
            namespace = namespace_digest({**facts, "files": found})
            saying.info("weights known namespace=%s", namespace.hex()[:16])
            return namespace
        saying.warning(
            "the cache is shared with no other engine, because it is unknown which weights this one has loaded: %s. "
            "Start the engine again, or set model_id in kv_connector_extra_config",
            why,
        )
        return namespace_digest({**facts, "files": [], "life": life})

    return in_background(name)


_silent = logging.getLogger("kvclient.silent")
_silent.disabled = True


def _digests(models: Sequence[ModelFiles], hashes: Hashes, log: logging.Logger, since_ns: int) -> tuple[list[str], str]:
    """The digest of each model; or none, and why the files do not identify the loaded weights."""
    files = list(dict.fromkeys(seen for model in models for seen in model.all))
    try:
        doubts = {seen: found for seen in files if (found := doubt(seen.path, since_ns=since_ns)) is not None}
        for found in doubts.values():
            if not found.blob:
                return [], f"{found.path} has changed since this engine began"
        _hash_all(models, doubts, hashes, log)
        for seen, found in doubts.items():
            if not _is_named_right(seen, found.blob, hashes):
                return [], f"{seen.path} does not hold what its name says"
        return [digest_of(model, hashes).hex() for model in models], ""
    except Changed as changed:
        return [], f"{changed} has changed since this engine began"
    except OSError as problem:
        return [], f"a file cannot be read ({problem})"


def _hash_all(models: Sequence[ModelFiles], doubts: Mapping[Seen, Doubt], hashes: Hashes, log: logging.Logger) -> None:
    weights = list(dict.fromkeys(seen for model in models for seen, _ in model.weights))
    new = [seen for seen in weights if hashes.kept(seen, wants_sha256=seen in doubts) is None]
    if not new:
        return
    total = sum(seen.id.bytes for seen in new)
    log.info("hashing weights files=%d bytes=%d; until that is done the cache serves nothing", len(new), total)
    began_s = time.monotonic()
    for seen in new:
        hashes.of(seen, wants_sha256=seen in doubts)
    seconds = time.monotonic() - began_s
    log.info("weights hashed seconds=%.1f rate=%.2f GB/s", seconds, total / 1e9 / max(seconds, 1e-9))


def _is_named_right(seen: Seen, blob: str, hashes: Hashes) -> bool:
    sha256 = hashes.of(seen, wants_sha256=True).sha256 if len(blob) == 64 else ""
    return is_blob(seen.path, blob, sha256)

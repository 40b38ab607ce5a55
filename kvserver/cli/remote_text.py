"""The lines that `kvserver remote status` prints for a status document."""

from collections.abc import Iterator, Mapping

from kvserver.units import rate, size
from kvserver.wire.status import RemoteStatus, Status

PREFIX = "remote_"


def lines_of(status: Status) -> list[str]:
    """One line if the server has no store. Several stores have an empty line between them."""
    if status.remote is None:
        return ["this server has no remote store; the key `remotes` names one"]
    if not status.other_remotes:
        counts = {name.removeprefix(PREFIX): count for name, count in counters_of(status).items()}
        failures = counts.pop("failures", {})
        assert isinstance(failures, dict)
        return [*_store(status.remote), *_facts(status, "remote"), *_counted(counts), *_failed(failures)]
    lines: list[str] = []
    for store in status.remotes:
        facts = _facts(status, f"remote:{store.name}")
        lines += ["", *_store(store), *facts, *_counted(store.counted), *_failed(store.failures)]
    return lines[1:]


def counters_of(status: Status) -> dict[str, int | dict[str, int]]:
    """The counters of the remote stores, with their names in the document."""
    return {name: count for name, count in status.counters.items() if name.startswith(PREFIX)}


def _store(remote: RemoteStatus) -> Iterator[str]:
    why = "" if remote.usable else f": {remote.problem or 'its mover does not run'}"
    yield f"{remote.name}     {remote.url}"
    yield f"usable    {'yes' if remote.usable else f'no{why}'}"
    for node in remote.nodes_left_alone:
        yield f"node      {node}: left alone after failures, and tried again by itself"
    yield (
        f"now       {remote.looked_for:,} prompts are looked for, {size(remote.reading_bytes)} being read, "
        f"{size(remote.writing_bytes)} being written, {remote.queued_chunks:,} chunks wait to be written"
    )
    yield f"notes     {remote.namespaces_known:,} of {remote.namespaces:,} namespaces in use are known"
    yield f"told      {remote.namespaces_heard:,} of {remote.namespaces:,} namespaces have announcements that are read"
    yield f"clears    {remote.clears_owed:,} are not known to the store yet"
    if remote.read_bytes_per_s:
        yield f"reads     {rate(remote.read_bytes_per_s)} as measured"


def _facts(status: Status, device: str) -> Iterator[str]:
    """Facts that a store tells of itself, by its mover."""
    for mover in status.movers:
        if mover.device == device:
            for name, text in mover.facts.items():
                if name not in ("remote", "url"):
                    yield f"fact      {name}: {text}"


def _counted(counts: Mapping[str, int | dict[str, int]]) -> Iterator[str]:
    """Counters since the brain started."""
    for name, count in counts.items():
        if isinstance(count, int):
            yield f"counted   {name} {count:,}"


def _failed(failures: Mapping[str, int]) -> Iterator[str]:
    for where, count in failures.items():
        yield f"failed    {where} {count:,}"

"""The lines that `kvserver remote status` prints for a status document."""

from collections.abc import Iterator

from kvserver.units import rate, size
from kvserver.wire.status import RemoteStatus, Status

PREFIX = "remote_"


def lines_of(status: Status) -> list[str]:
    """One line if the server has no store."""
    if status.remote is None:
        return ["this server has no remote store; the key `remotes` names one"]
    return [*_store(status.remote), *_facts(status), *_moved(status)]


def counters_of(status: Status) -> dict[str, int | dict[str, int]]:
    """The counters of the remote store, with their names in the document."""
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


def _facts(status: Status) -> Iterator[str]:
    """Facts that the store tells of itself, by its mover."""
    for mover in status.movers:
        if mover.device == "remote":
            for name, text in mover.facts.items():
                if name not in ("remote", "url"):
                    yield f"fact      {name}: {text}"


def _moved(status: Status) -> Iterator[str]:
    """Counters since the brain started."""
    counts = counters_of(status)
    for name, count in counts.items():
        if isinstance(count, int):
            yield f"counted   {name.removeprefix(PREFIX)} {count:,}"
    failures = counts.get("remote_failures")
    if isinstance(failures, dict):
        for where, count in failures.items():
            yield f"failed    {where} {count:,}"

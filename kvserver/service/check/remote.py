"""Invariants of the remote stores."""

from collections import Counter

from kvserver.service.state.core import Core
from kvserver.service.state.foretold import FORETELLING_MAX, FORETOLD_MAX
from kvserver.service.state.passing import Passing
from kvserver.service.state.remote_tier import (
    PURSUITS_MAX,
    QUEUE_MAX,
    USED_MAX,
    WANTED_MAX,
    FetchJob,
    NoteJob,
    ProbeJob,
    PutJob,
    RemoteTier,
)


def fetches(core: Core) -> set[int]:
    """Numbers of the reads that are under way: they write into slots, as stores do."""
    jobs = (job for tier in core.remotes for job in tier.jobs.values())
    return {job.number for job in jobs if isinstance(job, FetchJob)}


def _check_foretellings(tier: RemoteTier) -> None:
    told, marks = tier.foretellings, Counter[int]()
    for number, row in told.rows.items():
        assert row.pledge.number == number
        assert row.written < len(row.keys) == len(row.marks), "it ends with its last chunk"
        marks.update(row.marks[row.written :])
    assert marks == told.marks, "what is to come is counted"
    assert marks.total() == told.chunks <= FORETELLING_MAX
    assert told.said <= marks.keys(), "what comes no more was taken back"
    assert tier.remote.pledged == "write" or not told.rows
    assert max(len(tier.foretold.until_ns), len(told.mine)) <= FORETOLD_MAX


def check_remote(tier: RemoteTier) -> None:
    """Raises AssertionError at the first violated invariant."""
    jobs = tier.jobs.values()
    assert tier.mover is not None or not jobs, "orders end with their mover"
    assert tier.fetching_bytes == sum(job.bytes for job in jobs if isinstance(job, FetchJob))
    assert tier.putting_bytes == sum(job.bytes for job in jobs if isinstance(job, PutJob))
    notes = [job.digest for job in jobs if isinstance(job, NoteJob)]
    assert len(set(notes)) == len(notes), "one order for a namespace's note at a time"
    for digest, known in tier.epochs.items():
        assert known.has_job == (digest in notes)
        assert known.owes_clear or not known.clears, "a clear waits only for what the store does not know"
        if known.passing is not None and known.passing.forgotten == tier.known.forgotten:
            _check_passing(known.passing, tier.look_ahead(digest, known, known.passing.from_ns))
    for (digest, key), (pursuit, position) in tier.wanted.items():
        assert pursuit in tier.pursuits
        assert (pursuit.space.digest, pursuit.keys[position]) == (digest, key)
    assert len(tier.wanted) <= WANTED_MAX
    assert len(tier.pursuits) <= PURSUITS_MAX
    assert len(tier.queue) <= QUEUE_MAX
    assert len(tier.left_out) <= USED_MAX
    _check_foretellings(tier)
    probing = {job.pursuit for job in jobs if isinstance(job, ProbeJob)}
    for pursuit in tier.pursuits:
        assert pursuit.heads is not None or pursuit in probing, "what is looked for is asked for"
        assert pursuit.heads is None or pursuit.begun <= len(pursuit.heads) == len(pursuit.keys)
        assert pursuit.fetching == sum(isinstance(job, FetchJob) and job.pursuit is pursuit for job in jobs)


def _check_passing(kept: Passing, anew: Passing | None) -> None:
    """Checks what was settled of misses against what a look at the same time would settle now."""
    assert anew is not None, "misses are passed over only while that is settled"
    assert kept.until_ns <= anew.until_ns, "and no longer"
    if kept.marker is None or anew.marker is None:
        assert kept.marker is anew.marker, "all chunks are passed over exactly while no epoch counts"
    else:
        assert kept.marker.of(b"") == anew.marker.of(b""), "marks are those of the epoch that counts"

"""The promises for chunks whose bytes are not those that were stored. The simulator keeps these books itself."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvserver.service.base.effects import Answer, Effect
from kvserver.service.base.events import Event, Reported
from kvserver.service.service import Service
from kvserver.tiers.records import Record
from kvserver.wire.messages import ALL_RIGHT, Retrieved
from kvserver.wire.orders import Done, Moved, RemoteEnded, Scrubbed

from . import service_view
from .content import keys_of, path_of
from .ledger import Ledger
from .memory import Wrong

if TYPE_CHECKING:
    from .promises import Promises


class Expected(NamedTuple):
    """What the report of a mover must lead to."""

    mismatches: Counter[str]
    """Tier -> wrong shards."""
    unverified: int
    wrong_from: int
    """The first wrong chunk of a retrieve's prefix."""
    leaving: list[Record]
    """Wrong shards that the ledger holds until then."""


class DigestPromises:
    """The promises of one brain's life."""

    def __init__(self, ledger: Ledger, promises: "Promises") -> None:
        self._ledger = ledger
        self._promises = promises
        self._found: dict[int, list[Record]] = {}
        """Job (of a disk: its negative number) -> wrong shards of DRAM that its mover has reported."""
        self._scrubbed: dict[int, list[Record]] = {}
        """The same, for jobs that scrub."""

    def found(self, job: int, wrong: Sequence[Record | None]) -> None:
        if wrong:
            self._found[job] = [record for record in wrong if record is not None]

    def found_by_scrub(self, job: int, wrong: list[Record]) -> None:
        self._scrubbed[job] = wrong

    def before(self, event: Event, service: Service) -> Expected:
        """What must be counted after the event, and what must go."""
        mismatches, unverified = service_view.digest_counts(service)
        wrong: list[Record] = []
        match event:
            case Reported(_, Done() as done):
                wrong = self._found.pop(done.job, [])
                mismatches["dram"] += len(wrong)
                unverified += done.unverified
            case Reported(_, Moved() as moved):
                wrong = self._found.pop(-moved.job, [])
                faults = sum(fault.fault == "checksum" for fault in moved.faults)
                mismatches["dram" if wrong else "disk"] += faults
            case Reported(_, RemoteEnded(job, "digest")):
                wrong = self._found.pop(job, [])
                mismatches["dram" if wrong else "remote"] += 1
            case Reported(_, Scrubbed(job)):
                wrong = self._scrubbed.pop(job)
                mismatches["dram"] += len(wrong)
        leaving = [record for record in wrong if self._is_held(record)]
        first = min((len(path_of(record.key)) - 1 for record in wrong), default=ALL_RIGHT)
        return Expected(+mismatches, unverified, first, leaving)

    def after(self, expected: Expected, event: Event, effects: list[Effect], service: Service) -> None:
        mismatches, unverified = service_view.digest_counts(service)
        if (mismatches, unverified) != (expected.mismatches, expected.unverified):
            raise Wrong(f"{mismatches} wrong shards and {unverified} unverified ones are counted, not {expected}")
        if isinstance(event, Reported) and isinstance(event.report, Done):
            told = [e.reply.wrong_from for e in effects if isinstance(e, Answer) and isinstance(e.reply, Retrieved)]
            if told not in ([], [expected.wrong_from]):
                raise Wrong(f"a retrieve was told that chunks are wrong from {told} on, not {expected.wrong_from}")
        for record in expected.leaving:
            self._has_left(record, service)

    def _is_held(self, record: Record) -> bool:
        name = record.namespace, record.key, record.group, record.shard
        return self._ledger.records.get(record.offset) is record and self._ledger.held.get(name) == record.offset

    def _has_left(self, wrong: Record, service: Service) -> None:
        """The chunk and all below it are in no tier, and nobody counts on them any more."""
        namespace, path = wrong.namespace, path_of(wrong.key)
        held = [*self._ledger.held, *service_view.on_disk(service)]
        for name in held:
            if name[0] == namespace and path_of(name[1])[: len(path)] == path:
                raise Wrong(f"chunk {path} has wrong bytes, and {path_of(name[1])} is still held")
        keys = b"".join(keys_of(path))
        if service_view.servable_chunks_of(service, namespace, keys) >= len(path):
            raise Wrong(f"chunk {path} has wrong bytes, and a lookup finds it")
        self._promises.prefix_dropped(namespace, path)

"""Notes on the devices about clears: all records of a namespace, or of a prefix, up to a generation are void.

A note is written when a namespace is cleared or forgotten. Each new mover gets it again until one has confirmed that it
is durable; then the caller of the Clear is answered. docs/disk.md says what a Clear guarantees.
"""

from collections.abc import Callable, Iterable
from hashlib import sha256
from itertools import islice

from kvserver.errors import ResourceError
from kvserver.index.tags import Tags
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.holdings.disk_chunks import DiskChunks
from kvserver.service.holdings.namespace_documents import document_of
from kvserver.service.state.clears import Clear, Clears
from kvserver.service.state.outbox import Outbox
from kvserver.tiers.prefix_notes import ClearedPrefix, prefix_document
from kvserver.tiers.records import encode_document
from kvserver.wire.orders import ForgetNotes, Note, Noted, NotesForgotten

GENERATIONS = sha256(b"kvserver generations").digest()
"""Takes the place of a namespace in one special note: no record on any device has a generation above that note's
`void`. So generations also grow while a device is away, and its records are older than all that the others were told
meanwhile, above all a Clear."""
GENERATIONS_AHEAD = 1 << 20
"""Generations that one note reserves. A restart skips those that were not used."""
FORGOTTEN_AT_ONCE = 64
"""Notes removed at once: few enough to delay no read, and enough to be rare."""
CLEARS_MAX = 1024
"""Clears that wait for the disks, or that no disk could note yet. Each is an order to the disk mover."""


class ClearNotes:
    """All notes that the devices have, or will have."""

    def __init__(
        self,
        out: Outbox,
        chunks: Chunks,
        on_disk: DiskChunks,
        clears: Clears,
        send: Callable[[Note | ForgetNotes], bool],
    ) -> None:
        """send: gives an order to the disk mover. False when there is none."""
        self._out = out
        self._chunks = chunks
        self._on_disk = on_disk
        self._clears = clears
        self._send = send
        self.noted: dict[bytes, int] = {}
        """Note -> the generation up to which it makes records void. The devices have these notes, or will have them."""
        self.cleared: dict[bytes, ClearedPrefix] = {}
        """Note -> the prefix that it clears (clear_prefix.py)."""
        self.unnoted: set[bytes] = set()
        """Notes in `noted` that may not be durable yet."""
        self.owed: set[bytes] = set()
        """Notes whose clear was answered with the error `disk-clear`."""
        self.awaited: dict[bytes, list[Clear]] = {}
        """Note -> clears that wait until it is durable."""
        self.void_later: set[bytes] = set()
        """Namespaces that were cleared before the mover had listed what is on disk."""
        self.left_out: dict[bytes, Tags] = {}
        """Namespace -> tags of its tenants, for namespaces that may be on disk and are not in the index. There was no
        room for them, or they were forgotten."""
        self.generation_max = 0
        """Highest record generation that may be written. Every device has noted it (GENERATIONS)."""
        self._forgetting: set[bytes] = set()
        """Notes that the mover was told to remove and has not answered yet. They count as there."""
        self._may_forget = True
        """False: no device could remove notes, and none has written one since."""
        self._described: set[bytes] = set()
        """Namespaces whose document was sent to the mover."""
        self._sent = 0
        """Notes sent to the mover and not answered yet."""
        self._silent_from_ns = 0
        """Since when the mover has answered no note; 0: it answered one lately, or nobody has looked yet."""

    # ---------------------------------------------------------------- clears

    def check_room(self, notes: int) -> None:
        """Raises ResourceError when too many clears would wait with this many more notes. Nothing has been cleared
        then."""
        if sum(map(len, self.awaited.values())) + len(self.owed) + notes > CLEARS_MAX:
            raise ResourceError("clears", f"more than {CLEARS_MAX} clears would wait for the disks")

    def clear_prefix(self, note: bytes, prefix: ClearedPrefix) -> None:
        """The note will clear this prefix."""
        self.cleared[note] = prefix
        self.noted.setdefault(note, 0)

    def void(self, digest: bytes, *, listed: bool) -> None:
        """Makes all records written so far under a note void: now, or once the records on disk are listed."""
        if listed:
            self._void(digest)
        else:
            self.void_later.add(digest)

    def void_waiting(self) -> None:
        """The records on disk are listed."""
        for digest in sorted(self.void_later):
            self._void(digest)
        self.void_later.clear()

    def answer_when_void(self, clear: Clear, digests: list[bytes], *, listed: bool) -> None:
        """Makes the records under all these notes void, and ends the clear when the devices have noted it."""
        clear.await_notes(digests)
        for digest in digests:
            self.awaited.setdefault(digest, []).append(clear)
            self.void(digest, listed=listed)

    def give_up(self, number: int) -> None:
        """Ends a clear that has waited for the devices as long as a job may run."""
        clear = next(each for waiting in self.awaited.values() for each in waiting if each.number == number)
        for digest in clear.left:
            self.owed.add(digest)
            self.awaited[digest].remove(clear)
            if not self.awaited[digest]:
                del self.awaited[digest]
        clear.fail("the disks have not confirmed it in time")
        self._clears.end(clear)

    # ---------------------------------------------------------------- notes

    def found(self, note: bytes, void: int, prefix: ClearedPrefix | None) -> None:
        """A device has this note from an earlier brain."""
        self.noted[note] = max(void, self.noted.get(note, 0))
        if prefix is not None:
            self.cleared[note] = prefix

    def reserve_generations(self) -> None:
        """Has the devices note the next generations before records are written with them."""
        if self._chunks.generation + GENERATIONS_AHEAD // 2 > self.noted.get(GENERATIONS, 0):
            self.noted[GENERATIONS] = self._chunks.generation + GENERATIONS_AHEAD
            self._write(GENERATIONS)

    def describe(self, digest: bytes, before: int) -> None:
        """Has the devices note a namespace's document before its first record, which has the generation after `before`.
        If they had no note of it, an older one may have been forgotten, so earlier records of the namespace are void.
        """
        if digest not in self._described:
            self._described.add(digest)
            self.noted.setdefault(digest, before)
            self._write(digest)

    def describe_anew(self, digest: bytes) -> None:
        """A namespace's document has changed. Devices that have one get it again."""
        if digest in self.noted:
            self._write(digest)

    def write_again(self) -> None:
        """Sends all notes that no mover has confirmed as durable."""
        for note in sorted(self.unnoted):
            self._write(note)

    def forget_oldest(self, notes_max: int) -> None:
        """Removes the oldest notes of namespaces outside the index when there are more than that. All that devices hold
        of these namespaces is void, also on devices that are away. Notes of cleared prefixes stay, because their
        namespaces may live (clear_prefix.py)."""
        if len(self.noted) - len(self.cleared) > notes_max:
            needed = self._chunks.spaces.keys() | self.cleared.keys() | {GENERATIONS}
            self._forget(self._durable(note for note in self.noted if note not in needed), [])

    def forget_prefixes(self, notes: Iterable[bytes]) -> None:
        """Removes some of these notes of prefixes. Their namespaces have newer notes, or none because they were
        forgotten. Then they are named again: a mover may have died before it forgot them, or could not. Their old notes
        would let the records below the prefixes come back."""
        old = self._durable(notes)
        gone = {self.cleared[note].namespace for note in old} - self.noted.keys()
        self._forget(old, sorted(gone))

    def forgotten(self, report: NotesForgotten) -> None:
        """The mover has removed notes, or could not. Those that were written again meanwhile stay."""
        gone = [note for note in report.namespaces if note in self._forgetting]
        self._forgetting.clear()
        self._may_forget = report.kept
        for note in gone if report.kept else ():
            del self.noted[note]
            self.cleared.pop(note, None)
            self.left_out.pop(note, None)
        if gone and report.kept:
            self._out.log("notes forgotten", ("notes", len(gone)))

    def _durable(self, notes: Iterable[bytes]) -> list[bytes]:
        """Some of these notes, for which no clear waits any more."""
        return list(islice((note for note in notes if note not in self.unnoted), FORGOTTEN_AT_ONCE))

    def _forget(self, notes: list[bytes], before: list[bytes]) -> None:
        """Has the devices remove notes, those in `before` first. Only records written so far, of namespaces without a
        note, may be lost with them. Until a device has done so the notes count: a Clear must make them void again."""
        if not notes or self._forgetting or not self._may_forget:
            return
        if self._send(ForgetNotes([*before, *notes], self._chunks.generation)):
            self._forgetting.update(notes)
            self._described.difference_update(notes)

    def heed(self, noted: Noted, why_not: Callable[[], str]) -> None:
        """Heeds the end of a note. why_not: says why no device could write it."""
        self._sent -= 1
        self._silent_from_ns = 0
        self._may_forget = self._may_forget or noted.kept
        note = noted.namespace
        if noted.kept and noted.void == self.noted.get(note):
            self.unnoted.discard(note)
            if note in self.owed:
                self.owed.discard(note)
                self._out.log("clear durable", ("namespace", note[:6].hex()), ("left", len(self.owed)))
        if note == GENERATIONS and noted.kept:
            self.generation_max = max(noted.void, self.generation_max)
        waiting = self.awaited.pop(note, [])
        if later := [clear for clear in waiting if not clear.is_kept_by(note, noted.void)]:
            self.awaited[note] = later
        for clear in waiting:
            if clear not in later:
                if not noted.kept:
                    self.owed.add(note)
                    clear.fail(f"not durable yet on {why_not() or 'any device'}; it is tried again until it is")
                if clear.note_ended(note):
                    self._clears.end(clear)

    # ---------------------------------------------------------------- the mover

    def mover_ended(self) -> None:
        """The mover answers nothing any more."""
        self._sent = self._silent_from_ns = 0
        self._forgetting.clear()
        self._may_forget = True

    def silent_ns(self, now_ns: int) -> int:
        """How long the mover has left a note unanswered. To be asked at each tick."""
        if not self._sent:
            self._silent_from_ns = 0
        elif not self._silent_from_ns:
            self._silent_from_ns = now_ns
        return now_ns - self._silent_from_ns if self._silent_from_ns else 0

    # ---------------------------------------------------------------- inside

    def _void(self, digest: bytes) -> None:
        """Makes all records written so far void. The next write has a higher generation."""
        self.noted[digest] = self._chunks.next_generation()
        for clear in self.awaited.get(digest, ()):
            clear.note_says(digest, self.noted[digest])
        if digest not in self._chunks.spaces:
            self._described.discard(digest)
        self._write(digest)

    def _write(self, note: bytes) -> None:
        """Sends the note now. Each new mover gets it again until one has said that it is durable."""
        self.unnoted.add(note)
        self._forgetting.discard(note)
        self._sent += self._send(Note(note, self._document(note), self.noted[note]))

    def _document(self, note: bytes) -> bytes:
        """The document that the note carries; empty: the devices keep the one they know."""
        if (prefix := self.cleared.get(note)) is not None:
            return prefix_document(prefix)
        space = self._chunks.spaces.get(note)
        if space is None or not self._on_disk.writable(space):  # not writable: also while a rank's shape is unknown
            return b""
        return encode_document(document_of(space))

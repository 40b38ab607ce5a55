"""Messages between the brain, its movers and the supervisor, one SOCK_SEQPACKET message each.

Orders go brain → mover, reports mover → brain; wishes go brain → supervisor, news supervisor → brain. All are local
and of one release, so there is no version. Descriptors travel beside a message (SCM_RIGHTS), in the order named.
"""

from typing import Literal

import msgspec

from kvserver.wire.messages import Buffer, DeviceKind, Frame, GroupSpec, Mode, Staging

ORDER_BYTES_MAX = 400_000
"""An order fits one message in the default socket buffer of a non-root process (2 x wmem_max = 425,984)."""

WARNING_FACT = "warning"
"""Last word in the name of a fact in Ready that a person on call should see."""

JobKind = Literal["store", "retrieve"]
Packed = bytes
"""Numbers, packed; a name of its own where a field is called bytes."""
MoverKind = DeviceKind | Literal["disk", "remote"]

# ---------------------------------------------------------------- brain → mover


class MapBoard(Frame, tag="map-board", frozen=True):
    """Descriptor: the session's board. Sent before the session's first cache."""

    session: int


class DropBoard(Frame, tag="drop-board", frozen=True):
    """Sent when the session is gone and all its caches are unmapped."""

    session: int


class MapCache(Frame, tag="map-cache", frozen=True):
    """Descriptors: one per buffer of a host cache; the ring of a staged one. Report: Mapped or MapFailed."""

    cache: int
    session: int
    chunk_tokens: int
    buffers: list[Buffer]
    groups: list[GroupSpec]
    mode: Mode
    ipc_mode: str
    staging: list[Staging]
    """As in Register."""


class UnmapCache(Frame, tag="unmap-cache", frozen=True):
    """Waits for the cache's copies, then unmaps its memory. Report: Unmapped."""

    cache: int


class CopyGroup(Frame, frozen=True):
    """One group of a copy. Blocks are those of messages.GroupBlocks."""

    group: int
    first_block: int
    block_ids: bytes
    slots: bytes
    """Little-endian int64, one per chunk that the blocks touch: the arena offset of this rank's shard, -1 = skip."""
    names: bytes
    """The hash of the chunks' names in a retrieve, which the ledger must have at these slots (_native.Ledger.sums)."""


class Copy(Frame, tag="copy", frozen=True):
    """One job. The mover turns the state word live → submitted before the first byte, → done after the last."""

    job: int
    kind: JobKind
    cache: int
    word: int
    generation: int
    mode: Mode
    groups: list[CopyGroup]


class Cancel(Frame, tag="cancel", frozen=True):
    """Ends a job soon: pieces that have not begun are left out. Its Done still comes, once."""

    job: int


class ArenaReady(Frame, tag="arena-ready", frozen=True):
    """The first `slabs` slabs may be made ready for DMA. Jobs name only these.

    Sent to movers of GPUs and disks before all other orders, and again as the arena grows."""

    slabs: int


class Scrub(Frame, tag="scrub", frozen=True):
    """Compares slots of the arena with the ledger, for a mover of any device. Report: Scrubbed."""

    job: int
    items: Packed
    """_native.Scrubber says how they are packed."""


# ---------------------------------------------------------------- brain → disk mover

DISK_ITEMS_MAX = 2048
"""Records of one order or report: each is 152 bytes (tiers/records.py)."""


class Demote(Frame, tag="demote", frozen=True):
    """Writes slots to their extents. Report: Moved."""

    job: int
    records: bytes


class Promote(Frame, tag="promote", frozen=True):
    """Reads extents into slots. An extent is read only if it holds exactly that record. Report: Moved."""

    job: int
    records: bytes
    asked: bool = True
    """Somebody asked for the chunk. Otherwise it is read only to be compared, and counts as no hit."""


class Note(Frame, tag="note", frozen=True):
    """Keeps the description of a namespace on every device. Report: Noted."""

    namespace: bytes
    document: bytes
    void: int
    """Records up to this generation no longer belong to the namespace: it was cleared."""


class ForgetNotes(Frame, tag="forget-notes", frozen=True):
    """These namespaces are gone for good, with all their records. Report: NotesForgotten."""

    namespaces: list[bytes]
    """Removed in this order."""
    void: int
    """Upper bound of their records' generations."""


class Recover(Frame, tag="recover", frozen=True):
    """Asks for the namespaces that earlier brains have written. Reports: FoundNote for each, then Listed."""


class TellRecords(Frame, tag="tell-records", frozen=True):
    """Asks for the next of the records that Listed has counted. Report: FoundRecords."""


class DrainDevice(Frame, tag="drain-device", frozen=True):
    """Marks a device as being emptied, also for the time after a restart. Report: DeviceIs."""

    device: int


class EraseDevice(Frame, tag="erase-device", frozen=True):
    """Removes the files of a device that is empty. Report: DeviceIs."""

    device: int


# ---------------------------------------------------------------- brain → remote mover

PROBED_MAX = 256
"""Chunks of one ProbeRemote."""


class ProbeRemote(Frame, tag="probe-remote", frozen=True):
    """Reads the heads of chunks. Report: RemoteProbed."""

    job: int
    namespace: bytes
    epoch: int
    keys: Packed
    """Keys of 32 bytes, at most PROBED_MAX."""
    shards: int
    """How many shards a head has at most, so that no more is read."""


class FetchRemote(Frame, tag="fetch-remote", frozen=True):
    """Reads a chunk into slots, and compares it with its digests. Report: RemoteEnded."""

    job: int
    head: Packed
    """As RemoteProbed gave it (remote/chunk_value.py)."""
    slots: Packed
    """Little-endian int64, one for each shard of the head: an arena offset, -1 = not wanted."""


class PutRemote(Frame, tag="put-remote", frozen=True):
    """Writes a chunk from slots, unless their bytes are not those that an engine stored. Report: RemoteEnded."""

    job: int
    head: Packed
    """Without time and digests: the mover knows them, from its clock and from the ledger."""
    slots: Packed
    """As in FetchRemote; none is -1."""


class ReadRemoteNote(Frame, tag="read-remote-note", frozen=True):
    """Reads the note of a namespace. Report: RemoteNoteRead."""

    job: int
    namespace: bytes


class WriteRemoteNote(Frame, tag="write-remote-note", frozen=True):
    """Writes the note of a namespace. Report: RemoteNoteWritten."""

    job: int
    namespace: bytes
    epoch: int
    document: bytes
    replaces: bool
    """Whether it takes the place of a note that is there. Otherwise the first one wins."""


class AnnounceRemote(Frame, tag="announce-remote", frozen=True):
    """Tells other servers of chunks. Report: RemoteEnded."""

    job: int
    namespace: bytes
    epoch: int
    marks: Packed
    """As in remote/announcement.py."""


class ListenRemote(Frame, tag="listen-remote", frozen=True):
    """Reads what servers have announced since the last ListenRemote; the mover's first one reads all of it. Report:
    RemoteHeard."""

    job: int
    namespace: bytes
    epoch: int


Order = (
    MapBoard | DropBoard | MapCache | UnmapCache | Copy | Cancel | ArenaReady | Scrub
    | Demote | Promote | Note | ForgetNotes | Recover | TellRecords | DrainDevice | EraseDevice
    | ProbeRemote | FetchRemote | PutRemote | ReadRemoteNote | WriteRemoteNote | AnnounceRemote | ListenRemote
)  # fmt: skip

# ---------------------------------------------------------------- mover → brain


class Ready(Frame, tag="ready", frozen=True):
    """First report of a mover: it has mapped the arena and its self-test passed. A later one of a remote store's mover
    has facts that it could not learn at the start."""

    pid: int
    backend: str
    """The copy engine's name, for the log, /status and a metric."""
    facts: list[tuple[str, str]]
    """Facts about the device, by name, for /status: library, driver, kernels, speeds."""


class Mapped(Frame, tag="mapped", frozen=True):
    cache: int


class MapFailed(Frame, tag="map-failed", frozen=True):
    cache: int
    code: str
    message: str


class Unmapped(Frame, tag="unmapped", frozen=True):
    cache: int


class Done(Frame, tag="done", frozen=True):
    """A job's end: no byte of it moves any more.

    done: all bytes are in place and the word says so. abandoned: the client had given the job up. failed: the device
    failed. invalid: the request was wrong (block id out of range or twice)."""

    job: int
    status: Literal["done", "abandoned", "failed", "invalid"]
    bytes: int
    copy_ns: int
    """From the first byte to the last."""
    code: str
    message: str
    mode: Mode
    """The way the bytes moved. The mover chooses among the modes of the cache's registration. host: direct."""
    sums: Packed = b""
    """A store's sum of each shard with a slot, packed u64, in the order of the order's groups and their slots.
    Empty: without digests."""
    wrong: tuple[int, ...] = ()
    """A retrieve that failed as "digest" names all shards whose bytes are not those that were stored, numbered in that
    order. With bytes=0 slots hold other chunks than the order names, and nothing was copied."""
    unverified: int = 0
    """Shards of a retrieve that were not compared, because nobody summed them when they were stored."""


class Scrubbed(Frame, tag="scrubbed", frozen=True):
    """The end of a Scrub: its slots are not read any more."""

    job: int
    wrong: tuple[int, ...]
    """Items that have other bytes, or another name, than the ledger says. Numbered in their order."""
    bytes: int
    """Payloads that were compared. Those that nobody summed when they were stored are left out."""


# ---------------------------------------------------------------- disk mover → brain

Fault = Literal["io", "checksum", "stale", "short", "cancelled"]
"""io: the device failed. checksum: the bytes differ from those that were written, or, of a write, from those that an
engine stored. stale: another record is there. short: the
file ended. cancelled: the mover gave it up."""


DrainState = Literal["", "draining", "drained"]
"""drained: its store is gone. Empty: it is in normal use."""


class ItemFault(Frame, frozen=True):
    """A record of an order that failed."""

    item: int
    """Its index in the order."""
    fault: Fault


class Moved(Frame, tag="moved", frozen=True):
    """The end of a Demote or Promote: no byte of it moves any more. Items that are not named succeeded."""

    job: int
    faults: list[ItemFault]
    io_ns: int
    """From its first I/O to its last."""
    sums: bytes = b""
    """For a Promote: the sum of each record, packed u64, in the order of its records; NO_SUM for one that failed.
    Empty for a Demote."""


class Noted(Frame, tag="noted", frozen=True):
    """The end of a Note."""

    namespace: bytes
    void: int
    kept: bool
    """Whether it is durable on a device, or every device was drained. A start reads the notes of all devices. So
    one note counts for all devices, also for closed ones and for those that could not write it."""


class NotesForgotten(Frame, tag="notes-forgotten", frozen=True):
    """The end of a ForgetNotes."""

    namespaces: list[bytes]
    kept: bool
    """Whether a device has noted that their records are void. If not, every device may still have their notes. A note
    that stays on another device does no harm then."""


class DeviceIs(Frame, tag="device-is", frozen=True):
    """A device's state, after Ready and whenever it changes."""

    device: int
    bytes: int
    """Physical bytes of its files."""
    problem: str
    """Why it takes no writes; empty if it does."""
    drain: DrainState
    """State of the drain, as the device's directory says."""


class FoundNote(Frame, tag="found-note", frozen=True):
    """A namespace with a note, or with records but no readable note. Namespaces with the newest records come last."""

    namespace: bytes
    document: bytes
    """Empty: no device knows it."""
    void: int
    """The latest `void` of all notes. Without a note all its records are void: they may have been cleared."""
    newest: int
    """The last generation of its records on all devices; 0: it has none."""


class Listed(Frame, tag="listed", frozen=True):
    """The end of the FoundNotes."""

    records: int
    """Records that can be asked for."""
    damaged: int
    """Headers, labels and notes that were damaged or could not be read."""


class FoundRecords(Frame, tag="found-records", frozen=True):
    """The next chunks, whole: a chunk after its parent, its records together, the newest first. Empty: the end."""

    records: bytes


# ---------------------------------------------------------------- remote mover → brain

RemoteFault = str
"""Why a job did not do what it was to do; empty if it did. gone: the chunk is not there any more. digest: its bytes are
not those that an engine stored. unsummed: of a write, nobody has summed the chunk. existed: of a write, another one was
there first. left-alone: its node's breaker is open. cancelled: given up. Otherwise a code of remote/store.py:
remote-slow, remote-down, remote-full, remote-denied, remote-refused."""


class RemoteProbed(Frame, tag="remote-probed", frozen=True):
    """The end of a ProbeRemote."""

    job: int
    heads: list[Packed]
    """For each key its head; empty if it is not there, or if nothing is known (`faults`)."""
    faults: list[RemoteFault]
    """For each key why nothing is known, or what is wrong with what is there. Empty: all is known."""
    io_ns: int


class RemoteEnded(Frame, tag="remote-ended", frozen=True):
    """The end of a FetchRemote, PutRemote or AnnounceRemote: no byte of it moves any more."""

    job: int
    fault: RemoteFault
    io_ns: int
    sums: Packed = b""
    """The sum of each wanted shard, packed u64, in their order, after a FetchRemote that went well."""


class RemoteNoteRead(Frame, tag="remote-note-read", frozen=True):
    """The end of a ReadRemoteNote."""

    job: int
    fault: RemoteFault
    state: Literal["here", "absent", "damaged"]
    epoch: int
    document: bytes


class RemoteNoteWritten(Frame, tag="remote-note-written", frozen=True):
    """The end of a WriteRemoteNote. After a fault it may have happened all the same."""

    job: int
    fault: RemoteFault
    is_first: bool
    """Whether it stands. False: another note was there."""


class RemoteHeard(Frame, tag="remote-heard", frozen=True):
    """The end of a ListenRemote."""

    job: int
    fault: RemoteFault
    marks: Packed
    """The oldest first."""
    is_all: bool
    """Whether there were no more."""


class RemoteIs(Frame, tag="remote-is", frozen=True):
    """The state of the store, after Ready and whenever it changes."""

    problem: str
    """Why it is not used; empty if it is."""
    nodes_left_alone: list[str]
    """Nodes whose breaker is open, the first of them in order of their names."""


Report = (
    Ready | Mapped | MapFailed | Unmapped | Done | Scrubbed
    | Moved | Noted | NotesForgotten | DeviceIs | FoundNote | Listed | FoundRecords
    | RemoteProbed | RemoteEnded | RemoteNoteRead | RemoteNoteWritten | RemoteHeard | RemoteIs
)  # fmt: skip

# ---------------------------------------------------------------- brain → supervisor


class StartMover(Frame, tag="start-mover", frozen=True):
    """News: MoverStarted."""

    mover: int
    """Number that the brain chose; never used twice by one brain."""
    device: MoverKind
    device_id: str
    """As in Register; empty for the disks, which have one mover for all."""


class KillMover(Frame, tag="kill-mover", frozen=True):
    """SIGKILL. News: MoverReaped."""

    mover: int


Wish = StartMover | KillMover


class Alive(Frame, tag="alive", frozen=True):
    """A sign of life of the brain, every second."""


# ---------------------------------------------------------------- supervisor → brain


class MoverStarted(Frame, tag="mover-started", frozen=True):
    """Descriptors: the brain's end of the mover's socket, the mover's pidfd."""

    mover: int
    pid: int


class MoverReaped(Frame, tag="mover-reaped", frozen=True):
    """The process is gone: none of its copies can still run."""

    mover: int
    how: str
    """For the log: "exit 3", "signal 9"."""


class Grown(Frame, tag="grown", frozen=True):
    """The first `slabs` slabs of the arena are touched and may be used."""

    slabs: int
    problem: str
    """Why growth stopped early; empty if it did not."""
    placement: str = ""
    """The memory nodes of the arena, and the reason, in words."""


News = MoverStarted | MoverReaped | Grown

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_wish = msgspec.msgpack.Decoder(Wish | Alive).decode
decode_news = msgspec.msgpack.Decoder(News).decode

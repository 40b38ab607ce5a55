"""Names that must be counted at least once in SEEDS_FOR_ALL seeds; otherwise the simulator checks too little."""

from kvserver.service.telling.counters import PLEDGE_ENDS

from .faults import KINDS

SEEDS_FOR_ALL = 1000

_EVENTS = (
    "Arrived",
    "Commanded",
    "PeerGone",
    "Unheard",
    "WorkerGone",
    "Reported",
    "MoverGone",
    "ArenaGrew",
    "Tick",
    "GoOn",
)
_REQUESTS = (
    "Hello", "Attach", "Lane", "Offer", "Watch", "Register", "Unregister", "Lookup", "Release", "Store", "Retrieve",
    "Clear", "Drain", "Explain", "Status", "Await", "Pledge", "Unpledge",
)  # fmt: skip
_REPLIES = (
    "Welcome", "Attached", "LaneOpen", "Offered", "Watched", "Registered", "Unregistered", "Found", "Released",
    "Stored", "Retrieved", "Cleared", "Draining", "Explained", "StatusIs", "Error", "Held", "LetGo", "Changed",
    "TenantCleared", "Awaited", "Pledged", "Unpledged",
)  # fmt: skip
_EFFECTS = (
    "Publish", "Withdraw", "PutNamespace", "DropNamespace", "Answer", "AnswerWithBoard", "AnswerWithMover", "Instruct",
    "Ask", "CloseDescriptors", "CloseSession", "Log", "Audit", "ChangeLogLevel", "Tell", "GoOn",
)  # fmt: skip
_COMMANDS = (
    "ClearNamespace", "ClearTenant", "Pin", "Unpin", "Warm", "DrainServer", "Resume", "NewWeights", "SetLogLevel",
    "Reload",
)  # fmt: skip
_ORDERS = (
    *("MapBoard", "DropBoard", "MapCache", "UnmapCache", "Copy", "Cancel", "ArenaReady"),
    *("Demote", "Promote", "Note", "ForgetNotes", "Recover", "TellRecords", "DrainDevice", "EraseDevice"),
    "Scrub",
    *("ProbeRemote", "FetchRemote", "PutRemote", "ReadRemoteNote", "WriteRemoteNote"),
    *("AnnounceRemote", "ListenRemote"),
)
_REPORTS = (
    *("Ready", "Mapped", "MapFailed", "Unmapped", "Done"),
    *("Moved", "Noted", "NotesForgotten", "DeviceIs", "FoundNote", "Listed", "FoundRecords"),
    "Scrubbed",
    *("RemoteProbed", "RemoteEnded", "RemoteNoteRead", "RemoteNoteWritten", "RemoteHeard", "RemoteIs"),
)
_WISHES = ("StartMover", "KillMover")
_WHYS = ("", "full", "parent-absent", "ranks-missing", "busy", "abandoned", "discarded")
_ENDS = ("done", "abandoned", "failed", "invalid")
_CODES = (
    "attached-twice", "beyond-lease", "block-duplicate", "block-ids", "block-range", "cache-not-mapped",
    "cache-unknown", "caches", "descriptor-size", "descriptor-unknown", "descriptors", "geometry", "group",
    "hello-twice", "io", "jobs", "keys", "keys-chain", "layout", "lease-foreign", "lease-namespace", "lease-rank",
    "lease-unknown", "lease-used", "leases", "mode", "mover-lost", "name", "namespace", "namespaces", "not-attached",
    "not-coming", "not-held", "offer", "parent", "pledges", "protocol", "rank", "ranks", "registered-twice",
    "session-unknown", "sessions",
    "slot-size", "unregistered-twice", "watch", "word",
    "draining", "held-bytes", "hold-unknown", "holds", "key", "key-unknown", "namespace-unknown", "new-weights",
    "quiet", "reload", "ttl",
)  # fmt: skip

COUNTED = (
    *(
        f"counted {name}"
        for name in ("bytes_retrieved", "bytes_stored", "chunks_stored", "evicted_to_disk", "evictions")
    ),
    *(f"counted leases_{end}" for end in ("granted", "released", "expired")),
    *(f"counted lookup_{unit} {result}" for unit in ("chunks", "tokens") for result in ("dram", "unwanted", "miss")),
    *(f"counted lookup_ends {why}" for why in ("whole", "absent", "gone", "writing", "partial", "namespace")),
    *(f"counted short_stores {why}" for why in _WHYS if why),
    *(f"counted job_seconds {direction}" for direction in ("store", "retrieve", "demote")),
    *(f"counted jobs {end}" for end in _ENDS),
    *(f"counted errors {family}" for family in ("request", "resource", "device")),
    *(f"counted discarded {reason}" for reason in ("died", "failed", "abandoned", "deadline", "cleared")),
    *(
        f"counted {name}"
        for name in ("lookups", "lookups_hit", "stores", "stores_short", "retrieves", "mover_restarts")
    ),
    *(f"counted {name}" for name in ("sessions_opened", "sessions_closed", "evicted_for store", "disk_writes")),
)
"""Counters that must have moved even in a hundred seeds."""

EXPECTED = (
    *(f"event {name}" for name in _EVENTS),
    *(f"request {name}" for name in _REQUESTS),
    *(f"command {name}" for name in _COMMANDS),
    *(f"reply {name}" for name in _REPLIES),
    *(f"effect {name}" for name in _EFFECTS),
    *(f"order {name}" for name in _ORDERS),
    *(f"report {name}" for name in _REPORTS),
    *(f"wish {name}" for name in _WISHES),
    *(f"why {name}" for name in _WHYS),
    *(f"done {kind} {end}" for kind in ("store", "retrieve") for end in _ENDS),
    *(f"error {code}" for code in _CODES),
    *(f"discarded {reason}" for reason in ("died", "failed", "abandoned", "deadline", "cleared")),
    *COUNTED,
    *(f"counted lookup_{unit} {result}" for unit in ("chunks", "tokens") for result in ("disk", "declined")),
    *(f"counted lookup_ends {why}" for why in ("declined", "recovering")),
    "counted evicted_for index",
    "counted job_seconds promote",
    "accounts that gave to others",
    "accounts that gave to others on disk",
    "blocks compared",
    "chunks awaited",
    "chunks awaited from a store",
    *(f"chunks {what}" for what in ("foretold", "foretold and written", "taken back")),
    "retrieves that waited for a store",
    "transfers that wait for the end of their mover",
    "retrieves of what an engine of another size stored",
    *(f"pledge {how}" for how in PLEDGE_ENDS),
    "scrubs",
    "scrubs that found something",
    "counted disk_rewritten_bytes",
    *(f"disk_{name}" for name in ("writes", "reads", "evictions", "lost", "recovered")),
    *(f"{what} {kind}" for what in ("planted", "noticed") for kind in KINDS),
    "error digest",
    "prefixes right before a wrong chunk",
    *(f"disk {what}" for what in ("fault io", "fault checksum")),
    *(f"disk refused {reason}" for reason in ("budget", "late", "second-touch", "room", "shape")),
    *(f"drained {end}" for end in ("moved", "kept", "given-up")),
    "chunks voided on disk",
    *(f"disk {what}" for what in ("note failed", "prefix noted as its namespace")),
    "told by a later brain",
    "told of disk",
    *(f"router: {what}" for what in ("events", "replays", "messages lost", "batches lost for good")),
    *(f"router: {what}" for what in ("lookups that show what is held", "vLLM cleared its own cache")),
    *(f"counted remote_{what}" for what in ("probed", "found", "reads", "writes", "existed")),
    *(f"counted remote_{what}" for what in ("told", "heard", "unannounced")),
    *(f"remote ended {fault}" for fault in ("digest", "existed", "remote-slow", "left-alone")),
    "noticed by a write to the remote store",
    "device drained",
    *(f"device {what}" for what in ("left", "came back")),
    "devices brought back in the end",
    "notes that a device missed",
    "records on a device that came back",
    "memory lost",
    "prefixes served again from disk",
    "brain died",
    "brain died at start",
    *(f"arc {half}_ghost_hits" for half in ("recent", "frequent")),
    "chunks evicted",
    "chunks found",
    "leases expired",
    "marks restored",
    "mover died",
    "mover stopped",
    "prefixes served again",
    "slots of another size overwritten",
    "slots restored",
    "store abandoned by client",
)

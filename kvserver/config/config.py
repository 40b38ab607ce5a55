"""The configuration: one frozen struct, from defaults, then a TOML file, then flags, and nothing else.

Each key is declared once, with its type, default, bounds and description; --help, `kvserver config` and
deploy/kvserver.toml are made from that. A key exists only if the server cannot know its value by itself. Every Config
is valid: bounds and relations are checked at construction. There, 0 or "" for "choose for me" is replaced by the chosen
value, and sizes are rounded to whole pages and whole slabs.
"""

import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvserver.config import quotas
from kvserver.config.file import read_table
from kvserver.config.keys import Key, Within, declared
from kvserver.config.paths import check_directory, check_socket, default_cache_dir, default_socket
from kvserver.config.remotes import Remote
from kvserver.config.remotes import parse as parse_remotes
from kvserver.errors import ConfigError
from kvserver.units import GIB, KIB, MIB, TIB, show_bytes
from kvserver.wire.kv_events import replay_endpoint
from kvserver.wire.messages import BOARD_WORDS

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = (0, 2 * MIB, GIB)
DAY_MS = 86_400_000

SLAB_BYTES_AUTO_MAX = 256 * MIB
SLABS_MAX = 1 << 20  # the brain keeps some memory for each, also when it is empty
SLABS_AUTO_MIN = 16
"""Slabs that fit at least with the slab size that the server chooses. Several shard sizes can then share the arena, and
a big arena still has few slabs."""
THREADS_AUTO_MAX = 4
"""One socket's memory is saturated by about this many copying threads."""

DEVICES_MAX = 64
DISK_SEGMENTS_MAX = 1 << 20  # per device; brain and mover keep some memory for each, also when it is empty
DISK_HEAD_BYTES = 64 * KIB
"""Upper bound of the bytes before the first segment of a device."""
SUPERBLOCKS_BYTES = 16 * KIB
"""Superblocks before the first segment: two in each of the device's two files."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a server. Raises ConfigError if a value, or a relation between two, is impossible."""

    socket: Annotated[
        str,
        "Path of the ZeroMQ socket; the local door is made beside it as SOCKET.local. Empty: "
        "/run/kvserver/kvserver.sock for root, else kvserver/kvserver.sock in $XDG_RUNTIME_DIR.",
    ] = ""
    socket_group: Annotated[
        str, "Group whose members may connect as well (sockets get mode 0660). Empty: only this user (0600)."
    ] = ""
    arena_bytes: Annotated[
        int,
        Within(MIB, 64 * TIB),
        "DRAM for cached chunks. It is taken in the background, slab by slab, after the server has begun to "
        "answer. Rounded down to whole slabs.",
    ] = 4 * GIB
    slab_bytes: Annotated[
        int,
        Within(0, GIB),
        "The arena is cut into slabs; a slab serves shards of one size at a time, and no shard can be larger than "
        "a slab. Rounded up to whole pages. 0: a power of two, a sixteenth of the arena at most and 256MiB at "
        "most.",
    ] = 0
    huge_page_bytes: Annotated[
        int, Within(0, GIB), "Back the arena by reserved huge pages of this size, 2MiB or 1GiB. 0: ordinary pages."
    ] = 0
    arena_path: Annotated[
        str,
        "Directory on tmpfs, or with huge_page_bytes on hugetlbfs, for the arena and its ledger as files that the "
        "next start finds again, where no systemd keeps them. Made when it is missing. On ext4 or xfs, best "
        "mounted with DAX, the arena lies there instead of in memory, and so it does on a device DAX such as "
        "/dev/dax0.0; neither is found again. Empty: memory that ends with the server.",
    ] = ""
    ledger_path: Annotated[
        str,
        "Directory on tmpfs for the ledger, where arena_path is on hugetlbfs, which would fill the ledger's holes. "
        "Empty: arena_path.",
    ] = ""
    numa_node: Annotated[
        int,
        Within(-1, 1023),
        "NUMA node that the arena is taken from while it has memory. -1: that of the GPUs, and where they are on "
        "several, these in turn; wherever the kernel puts it without GPUs, or under numactl.",
    ] = -1
    touch_threads: Annotated[
        int, Within(0, 256), "Threads that touch new memory of the arena. 0: half the cores, 4 at most."
    ] = 0
    copy_threads: Annotated[
        int, Within(0, 256), "Threads that copy in a mover of the host device. 0: one a core, 4 at most."
    ] = 0
    device_library: Annotated[
        str, "Path of the GPU driver's library, libcuda.so.1 or libamdhip64.so. Empty: the one that the system finds."
    ] = ""
    arena_reach: Annotated[
        Literal["auto", "register", "bounce"],
        "How GPUs reach the arena: register = DMA on the arena itself, bounce = over pinned memory of the mover's "
        "own. auto: register on NVIDIA, bounce on AMD.",
    ] = "auto"
    cache_dir: Annotated[
        str,
        "Directory for compiled kernels, measurements of devices, and clears that no disk could note, made when it "
        "is missing. Empty: "
        "/var/cache/kvserver for root, else kvserver in $XDG_CACHE_HOME or ~/.cache.",
    ] = ""
    digests: Annotated[
        Literal["on", "off"],
        "on: each chunk that is loaded is compared with what an engine stored, by a sum over its bytes "
        "(docs/digest.md). off: bytes that changed in memory are delivered as right.",
    ] = "on"
    scrub_bytes_per_s: Annotated[
        int,
        Within(0, TIB),
        "Bytes of DRAM, and as many of the disks, that are read each second to find chunks that changed, before "
        "anybody asks for them. 0: none.",
    ] = 0
    eviction_policy: Annotated[
        Literal["lru", "arc"],
        "What leaves DRAM first. lru: what was used longest ago. arc: what came once may have less room than what "
        "was asked for again, and the server learns how much; for small arenas, and chat beside agents. arc goes "
        "neither with disk_paths nor with tenants.",
    ] = "lru"
    tenants: Annotated[
        str,
        'Quotas in the arena, by the tenant that caches are registered with: "agents=3GiB..8GiB, chat=..1GiB" '
        'guarantees agents 3GiB and holds chat to 1GiB; "default" stands for all tenants without an entry. In a file a '
        "table. Empty: none, and nothing is counted by tenant.",
    ] = ""
    disk_paths: Annotated[
        str,
        "Directories of the disk tier, one for each device, with commas between them, or in a file a list; file:// "
        "before a path is accepted. What is missing is made right below a mount point only. Empty: no disk tier.",
    ] = ""
    disk_bytes: Annotated[
        int, Within(MIB, 255 * TIB), "Physical bytes that may be taken in each directory, all of them at the start."
    ] = 64 * GIB
    disk_segment_bytes: Annotated[
        int,
        Within(64 * KIB, 16 * GIB),
        "A device is cut into segments; a segment serves shards of one size at a time, and no shard on disk can be "
        "larger. Rounded up to whole pages. A device keeps the one that it was made with.",
    ] = 64 * MIB
    disk_run_tokens: Annotated[
        int,
        Within(1, 1 << 30),
        "Tokens of a prompt that lie on one device; the next ones lie on another. More: a lost device costs fewer "
        "prompts. Fewer: one prompt is read from more devices at a time.",
    ] = 16_384
    disk_tenants: Annotated[
        str,
        'Quotas on disk, all devices together, written as those in tenants: "agents=1TiB.., chat=..200GiB". In a '
        "file a table. Empty: none.",
    ] = ""
    disk_write_policy: Annotated[
        Literal["evict", "through"],
        "evict: write what is next to leave DRAM. through: write everything that is stored, as soon as it may.",
    ] = "evict"
    disk_admission: Annotated[
        Literal["all", "second-touch"],
        "second-touch: write only chunks that were asked for after they had been stored, or are stored again. "
        "Saves writes and costs hits, many of them where prompts come back once.",
    ] = "all"
    disk_daily_write_bytes: Annotated[
        int, Within(0, 1024 * TIB), "Bytes that may be written to each device in any 24 hours. 0: no limit."
    ] = 0
    disk_write_queue_ms: Annotated[
        int, Within(1, 60_000), "Writes wait no longer than this for their device, at the rate that was measured."
    ] = 1_000
    disk_clean_percent: Annotated[
        int,
        Within(1, 100),
        "Share of the arena, by age its coldest, that is kept free, or on disk as well, so that it can be taken at "
        "once. Chunks that leave DRAM before they were written are lost.",
    ] = 25
    disk_job_ms: Annotated[
        int, Within(1, 600_000), "A disk mover that has not ended a read or write by then is killed."
    ] = 10_000
    disk_engine: Annotated[
        Literal["auto", "uring", "threads"], "How devices are read and written. auto: io_uring where it is allowed."
    ] = "auto"
    disk_depth: Annotated[int, Within(1, 1024), "Payloads under way at a device."] = 32
    remotes: Annotated[
        str,
        'Stores that several servers share. "NAME=URL?key=value&key=value", for example '
        '"fleet=valkey://10.0.0.7?password_file=/etc/kvserver/valkey" or "fleet=s3://BUCKET/PREFIX?write=through". '
        "Spaces stand between several. In a file tables [remotes.NAME] with url and the keys (docs/remote.md). Empty: "
        "none.",
    ] = ""
    recompute_tokens_per_s: Annotated[
        int,
        Within(0, 1_000_000_000),
        "How fast an engine prefills. A prefix that disks or a remote store would bring more slowly, at the rates that "
        "were measured in the last minute, is not offered. 0: it always is.",
    ] = 0
    chunks_max: Annotated[
        int, Within(1, 100_000_000), "Chunks in the index, all namespaces together; bounds the brain's memory."
    ] = 4_000_000
    namespaces_max: Annotated[int, Within(1, 256), "Namespaces that are held at the same time."] = 256
    sessions_max: Annotated[int, Within(1, 65_536), "Client processes at the same time."] = 1024
    caches_max: Annotated[int, Within(1, 65_536), "Registered caches, all sessions together."] = 1024
    leases_max: Annotated[int, Within(1, 1_000_000), "Leases at the same time, all engines together."] = 4096
    jobs_max: Annotated[int, Within(1, BOARD_WORDS), "Stores and retrieves in flight for one session."] = 64
    lease_ttl_ms: Annotated[
        int, Within(1, DAY_MS), "How long a lease lives unused: the longest wait between a lookup and its retrieve."
    ] = 30_000
    lease_extended_ms: Annotated[
        int, Within(1, DAY_MS), "How long a lease lives after its first retrieve, for the other ranks to begin theirs."
    ] = 10_000
    pledge_ttl_ms: Annotated[
        int, Within(1, DAY_MS), "How long other engines wait at most for a prompt that an engine said it computes."
    ] = 120_000
    pledge_patience_ms: Annotated[
        int, Within(1, DAY_MS), "They stop earlier when no chunk of that prompt was stored for so long."
    ] = 5_000
    reserve_ttl_ms: Annotated[
        int, Within(1, DAY_MS), "A chunk of which some rank has not stored its shard by then is discarded."
    ] = 10_000
    job_ttl_ms: Annotated[int, Within(1, DAY_MS), "No store or retrieve runs longer, whatever its client says."] = (
        60_000
    )
    attach_ttl_ms: Annotated[int, Within(1, DAY_MS), "A session that has not attached by then is closed."] = 10_000
    mover_grace_ms: Annotated[
        int, Within(1, 60_000), "A mover that has not ended a cancelled job, or let a cache go, by then is killed."
    ] = 2_000
    mover_start_ms: Annotated[
        int, Within(1, 3_600_000), "A mover that is not ready by then is killed, and requests that wait for it fail."
    ] = 30_000
    http_host: Annotated[str, "Address for /healthz, /readyz, /metrics and /status."] = "127.0.0.1"
    http_port: Annotated[int, Within(0, 65_535), "Port for them. 0: none."] = 9710
    http_names: Annotated[
        str,
        "Names, with commas between them, by which others ask for these pages: those that a DNS gives to this "
        "machine, or a proxy or service to it. IP addresses, localhost, the hostname and http_host are known. "
        "A request for another name is refused, since a web page of a stranger may have sent it.",
    ] = ""
    events_endpoint: Annotated[
        str,
        "ZeroMQ endpoint, tcp://HOST:PORT or ipc://PATH, at which is published what is held (docs/events.md). "
        "What was missed is asked for at PORT + 1, or PATH.replay. Empty: nothing is published.",
    ] = ""
    admin_token_file: Annotated[
        str,
        "File with the tokens of those who may command the server over HTTP (POST /admin/…, from this machine "
        "only): lines NAME: TOKEN, mode 0600 or 0640. Empty: the token in $KVSERVER_ADMIN_TOKEN; without either "
        "nobody may.",
    ] = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "Least level that is logged."] = "info"
    log_format: Annotated[Literal["text", "json"], "Form of a log line on standard error."] = "text"

    def __post_init__(self) -> None:
        for key in KEYS:
            key.check(getattr(self, key.name))
        if 0 < self.slab_bytes < PAGE_BYTES:
            raise ConfigError("config-slab", f"slab_bytes={self.slab_bytes} must be 0, or {PAGE_BYTES} at least")
        self._choose()
        _check_arena(self)
        check_socket(self.socket)
        _check_disk(self)
        _check_policy(self)
        _check_tenants(self)
        _check_remote(self)
        if self.events_endpoint:
            replay_endpoint(self.events_endpoint)
        if not self.http_host:
            raise ConfigError("config-http", 'http_host="" must be an address; http_port=0 turns HTTP off')

    @property
    def ledger_span_bytes(self) -> int:
        """Address span of the ledger: the arena, and after it one page for each chunk that has no slot."""
        return self.arena_bytes + self.chunks_max * PAGE_BYTES

    @property
    def disk_directories(self) -> tuple[str, ...]:
        """The directories of the disk tier, one for each device."""
        paths = [path.strip().removeprefix("file://") for path in self.disk_paths.split(",")]
        return tuple(os.path.normpath(path) for path in paths if path)

    @property
    def remote_stores(self) -> tuple[Remote, ...]:
        return parse_remotes(self.remotes)

    @property
    def disk_segments(self) -> int:
        """Segments per device, after the DISK_HEAD_BYTES at the beginning of its file."""
        return (self.disk_bytes - DISK_HEAD_BYTES) // self.disk_segment_bytes

    @property
    def disk_store_bytes(self) -> int:
        """Bytes of one device's files: superblocks and whole segments (csrc/disk/store_files.cpp)."""
        segments = (self.disk_bytes - SUPERBLOCKS_BYTES) // self.disk_segment_bytes
        return SUPERBLOCKS_BYTES + segments * self.disk_segment_bytes

    @property
    def disk_room_bytes(self) -> int:
        """Bytes for records on all devices together: the segments without their tables of headers."""
        table_bytes = max(1, self.disk_segment_bytes // 64 // PAGE_BYTES) * PAGE_BYTES
        return len(self.disk_directories) * self.disk_segments * (self.disk_segment_bytes - table_bytes)

    def _choose(self) -> None:
        """Fills in values that the operator left to the server, and rounds sizes to whole pages and slabs.

        These are the only writes to a Config, before anyone else has it."""
        choose = msgspec.structs.force_setattr
        cores = len(os.sched_getaffinity(0))
        if not self.socket:
            choose(self, "socket", default_socket())
        if not self.cache_dir:
            choose(self, "cache_dir", default_cache_dir())
        if not self.touch_threads:
            choose(self, "touch_threads", max(1, min(cores // 2, THREADS_AUTO_MAX)))  # the start needs the others
        if not self.copy_threads:
            choose(self, "copy_threads", min(cores, THREADS_AUTO_MAX))
        if not self.slab_bytes:
            part = 1 << (self.arena_bytes // SLABS_AUTO_MIN).bit_length() - 1  # rounded down to a power of two
            slab_bytes = min(SLAB_BYTES_AUTO_MAX, max(MIB, part))
            choose(self, "slab_bytes", max(slab_bytes, self.huge_page_bytes))
        page_bytes = self.huge_page_bytes or PAGE_BYTES
        choose(self, "slab_bytes", -(-self.slab_bytes // page_bytes) * page_bytes)
        choose(self, "disk_segment_bytes", -(-self.disk_segment_bytes // PAGE_BYTES) * PAGE_BYTES)
        if self.arena_bytes >= self.slab_bytes:
            choose(self, "arena_bytes", self.arena_bytes // self.slab_bytes * self.slab_bytes)


KEYS = declared(Config)
RENAMED = {"arena_path_gpu": "arena_reach"}
"""Old name of a key -> its new name, for the error message. Without it the message would suggest arena_path."""
_BY_NAME = {key.name: key for key in KEYS}


def load(path: Path | None, flags: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """The configuration in force, and the origin of each key's value. Raises ConfigError.

    flags: texts by key name. Origins: "default", "FILE:LINE" or "--flag", with a note if the server chose or rounded
    the value."""
    values: dict[str, object] = {}
    origins = {key.name: "default" for key in KEYS}
    try:
        for name, (value, line) in (read_table(path) if path is not None else {}).items():
            if isinstance(value, dict) and name not in _BY_NAME:
                hint = "keys stand at the top of the file, under no heading"
                raise ConfigError("config-key", f"{path}:{line}: [{name}] is a table; {hint}")
            key = _known(name, f"{path}:{line}")
            origins[name] = f"{path}:{line}"
            values[name] = key.read(value)
        for name, text in flags.items():
            key = _known(name, "flags")
            origins[name] = key.flag
            values[name] = key.parse(text)
        config = msgspec.convert(values, Config)
        _check_given(config, values)
    except ConfigError as error:
        raise ConfigError(error.code, error.message + _whence(error.message, origins)) from None
    for key in KEYS:
        given, taken = values.get(key.name, key.default), getattr(config, key.name)
        if not given and taken:
            origins[key.name] += ", chosen by the server"
        elif given != taken:
            way = "down" if taken < given else "up"
            origins[key.name] += f", rounded {way} from {given} bytes"
    return config, origins


def example() -> str:
    """A configuration file that changes nothing: every key with its meaning and its default, commented out."""
    lines = ["# For kvserver serve --config FILE: every key with its default. Flags of the same names win.", ""]
    for key in KEYS:
        lines += textwrap.wrap(key.about.text, 100, initial_indent="# ", subsequent_indent="# ")
        lines += [f"# {key.expected}"] if key.choices else []
        lines += [f"#{key.name} = {key.toml(key.default)}", ""]
    return "\n".join(lines)


# ---------------------------------------------------------------- relations


def _check_arena(config: Config) -> None:
    arena, slab, huge = config.arena_bytes, config.slab_bytes, config.huge_page_bytes
    if huge not in HUGE_PAGE_BYTES:
        raise ConfigError("config-huge-page", f"huge_page_bytes={show_bytes(huge)} must be 0, 2MiB or 1GiB")
    if arena < slab:
        raise ConfigError(
            "config-arena",
            f"arena_bytes={show_bytes(arena)} must hold a slab of slab_bytes={show_bytes(slab)} at least",
        )
    if (slabs := arena // slab) > SLABS_MAX:
        raise ConfigError(
            "config-slab",
            f"arena_bytes={show_bytes(arena)} are {slabs:,} slabs of slab_bytes={show_bytes(slab)}; there may be "
            f"{SLABS_MAX:,}",
        )
    check_directory("arena_path", config.arena_path)
    check_directory("ledger_path", config.ledger_path)
    if config.ledger_path and not config.arena_path:
        raise ConfigError("config-path", f"ledger_path={config.ledger_path!r} needs an arena_path; it is empty")


def _check_disk(config: Config) -> None:
    directories, paths = config.disk_directories, f"disk_paths={config.disk_paths!r}"
    absolute = directories and all(path.startswith("/") for path in directories)
    if "\0" in config.disk_paths or (config.disk_paths and not absolute):
        raise ConfigError("config-disk", f"{paths} must be absolute paths with commas between them")
    if len(set(directories)) < len(directories):
        raise ConfigError("config-disk", f"{paths} names a directory twice")
    if len(directories) > DEVICES_MAX:
        raise ConfigError("config-disk", f"{paths} names {len(directories)} devices, at most {DEVICES_MAX} are used")
    if directories and not 1 <= config.disk_segments <= DISK_SEGMENTS_MAX:
        raise ConfigError(
            "config-disk",
            f"disk_bytes={show_bytes(config.disk_bytes)} hold {max(config.disk_segments, 0):,} segments of "
            f"disk_segment_bytes={show_bytes(config.disk_segment_bytes)}; a device has 1 to {DISK_SEGMENTS_MAX:,}",
        )


def _check_given(config: Config, given: Mapping[str, object]) -> None:
    """Refuses disk keys without disk_paths: the server would run without a disk tier, unnoticed by the operator.

    An explicit empty disk_paths turns the disk tier off, and the other disk keys may stay."""
    if "disk_paths" in given:
        return
    for key in KEYS:
        if key.name in given and key.name.startswith("disk_"):
            named = f"{key.name}={key.show(getattr(config, key.name))}"
            raise ConfigError("config-disk", f'{named} needs disk_paths; disk_paths="" says that there are no disks')


def _check_policy(config: Config) -> None:
    """Refuses ARC together with disks or quotas.

    Disks get the chunks that leave DRAM next by age, so they would get what ARC keeps instead of what it drops. And ARC
    has one target for all tenants: evictions at one tenant's quota would move it for the others."""
    for name in ("disk_paths", "tenants"):
        if config.eviction_policy == "arc" and (value := getattr(config, name)):
            expected = f'{name}="" or eviction_policy=lru'
            raise ConfigError("config-eviction", f"eviction_policy=arc with {name}={value!r}: expected {expected}")


def _check_tenants(config: Config) -> None:
    quotas.together(config.tenants, config.disk_tenants)
    quotas.check("tenants", config.tenants, tier_bytes=config.arena_bytes)
    if config.disk_tenants and not config.disk_directories:
        raise ConfigError("config-tenants", f"disk_tenants={config.disk_tenants!r} needs disks; disk_paths is empty")
    quotas.check("disk_tenants", config.disk_tenants, tier_bytes=config.disk_room_bytes)


def _check_remote(config: Config) -> None:
    """Refuses a remote store without digests: nothing could tell whether its bytes are those that were stored."""
    for remote in config.remote_stores:
        if config.digests == "off":
            raise ConfigError("config-remote", f"remotes.{remote.name} needs digests=on; it is off")


# ---------------------------------------------------------------- text


def _known(name: str, where: str) -> Key:
    key = _BY_NAME.get(name)
    if name in RENAMED:
        raise ConfigError("config-key", f"{where}: {name!r} is called {RENAMED[name]!r} now, with the same values")
    if key is None:
        import difflib  # noqa: PLC0415 - costs a third of this module's import, and only a mistake needs it

        near = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(_BY_NAME)}"
        raise ConfigError("config-key", f"{where}: unknown key {name!r}; {hint}")
    return key


def _whence(message: str, origins: Mapping[str, str]) -> str:
    """The origins of the values that a message names, without defaults; empty if there are none."""
    named = [key.name for key in KEYS if f"{key.name}=" in message and origins[key.name] != "default"]
    return f" ({', '.join(f'{name} from {origins[name]}' for name in named)})" if named else ""

"""Quotas as the operator writes them: "agents=3GiB..8GiB, chat=..1GiB", or a table of ranges in a file.

One text is for the arena, another for the disks. A tenant named in either has an account in both. The first size of a
range is guaranteed, the second is the most that the tenant may hold; either may be left out.
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvserver.errors import ConfigError
from kvserver.units import parse_bytes, show_bytes
from kvserver.wire.messages import NAME_BYTES_MAX
from kvserver.wire.tenants import tag_of

TENANTS_MAX = 64


class Range(NamedTuple):
    """Guarantee and maximum of a tenant. 0: nothing is guaranteed, or there is no maximum."""

    guaranteed_bytes: int = 0
    max_bytes: int = 0


def joined(table: Mapping[str, object]) -> str:
    """The table of a file, written as the text of a flag."""
    return ", ".join(f"{name}={sizes}" for name, sizes in table.items())


def parse(key: str, text: str) -> dict[str, Range]:
    """Tenant -> its range. key: the configuration's key, for errors. Raises ConfigError."""
    ranges: dict[str, Range] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, _, sizes = (word.strip() for word in entry.partition("="))
        if not 1 <= len(name.encode()) <= NAME_BYTES_MAX or not name.isprintable():
            raise _wrong(key, entry, f"a tenant's name is 1 to {NAME_BYTES_MAX} printable bytes")
        if name in ranges:
            raise _wrong(key, entry, "the tenant has a quota already")
        ranges[name] = _range(key, entry, sizes)
    return ranges


def together(tenants: str, disk_tenants: str) -> dict[str, tuple[Range, Range]]:
    """Tenant -> its ranges in the arena and on the disks. Raises ConfigError."""
    arena, disks = parse("tenants", tenants), parse("disk_tenants", disk_tenants)
    names = dict.fromkeys((*arena, *disks))
    keys = " and ".join(key for key, ranges in (("tenants", arena), ("disk_tenants", disks)) if ranges)
    if len(names) > TENANTS_MAX:
        raise ConfigError("config-tenants", f"{keys} name {len(names)} tenants, at most {TENANTS_MAX} may have quotas")
    tags: dict[int, str] = {}
    for name in names:
        if tags.setdefault(tag_of(name), name) != name:
            raise ConfigError("config-tenants", f"{keys}: {name!r} and {tags[tag_of(name)]!r} have one tag; rename one")
    return {name: (arena.get(name, Range()), disks.get(name, Range())) for name in names}


def check(key: str, text: str, *, tier_bytes: int) -> None:
    """Raises ConfigError unless all guarantees together fit the tier."""
    promised = sum(sizes.guaranteed_bytes for sizes in parse(key, text).values())
    if promised > tier_bytes:
        raise ConfigError(
            "config-tenants", f"{key}={text!r} guarantees {show_bytes(promised)}, there are {show_bytes(tier_bytes)}"
        )


def _range(key: str, entry: str, sizes: str) -> Range:
    least, dots, most = (word.strip() for word in sizes.partition(".."))
    found = [parse_bytes(word) if word else 0 for word in (least, most)]
    if not dots or None in found or not (least or most):
        raise _wrong(key, entry, "expected NAME=GUARANTEED..MAXIMUM, such as agents=3GiB..8GiB or chat=..1GiB")
    guaranteed_bytes, max_bytes = (size or 0 for size in found)
    if most and not max(1, guaranteed_bytes) <= max_bytes:
        raise _wrong(key, entry, "the maximum must not be less than what is guaranteed, nor 0")
    return Range(guaranteed_bytes, max_bytes)


def _wrong(key: str, entry: str, why: str) -> ConfigError:
    return ConfigError("config-tenants", f"{key}: {entry!r}: {why}")

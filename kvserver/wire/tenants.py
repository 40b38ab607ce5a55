"""How tenants are named: by the text that a cache is registered with, and in records by its tag."""

from zlib import crc32

OTHERS = "default"
"""In quotas: whoever has no entry of its own, caches without a tenant above all."""


def tag_of(tenant: str) -> int:
    """What chunks carry of a tenant's name, in the index and in the records of ledger and disks."""
    return crc32(tenant.encode())

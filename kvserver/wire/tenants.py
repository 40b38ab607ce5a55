"""How tenants are named: by the text that a cache is registered with, and in records by its tag."""

from zlib import crc32

OTHERS = "default"
"""In quotas: whoever has no entry of its own, caches without a tenant above all."""


def tag_of(tenant: str) -> int:
    """The tag that stands for a tenant's name on chunks in the index, the ledger and on disks."""
    return crc32(tenant.encode())

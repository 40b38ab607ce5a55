"""Names of tenants: the text that a cache is registered with, and its tag in records."""

from zlib import crc32

OTHERS = "default"
"""In quotas: all tenants without an entry of their own, and caches without a tenant."""


def tag_of(tenant: str) -> int:
    """The tag that stands for a tenant's name on chunks in the index, the ledger and on disks."""
    return crc32(tenant.encode())

"""Where entries of a ledger lie, and what they consist of."""

from kvserver.transfer.native import Ledger

HEADER_BYTES = 32
DOCUMENT_STRIDE = 4096 + Ledger.DOCUMENT_BYTES_MAX
ENTRIES = 4096 + Ledger.NAMESPACES_MAX * DOCUMENT_STRIDE
"""Offset of the entries in the file, for the tests that damage it."""
ENTRY_BYTES, PAGE_BYTES = 136, 4096
ENTRIES_A_PAGE = PAGE_BYTES // ENTRY_BYTES
DIGEST_AT, SEAL_AT = 104, 128
"""Offsets in an entry."""


def entry_at(place: int) -> int:
    """Offset in the file of the entry of a place: a slot's offset / SLOT_ALIGN. No entry crosses a page."""
    page, rest = divmod(place, ENTRIES_A_PAGE)
    return ENTRIES + page * PAGE_BYTES + rest * ENTRY_BYTES

"""Where entries of a ledger lie, and what they consist of."""

import struct

from kvserver.transfer.native import Ledger

RECORD = struct.Struct("<q32s32s32sHHIIIQQ")
HEADER_BYTES = 32
DOCUMENT_STRIDE = 4096 + Ledger.DOCUMENT_BYTES_MAX
ENTRIES = 4096 + Ledger.NAMESPACES_MAX * DOCUMENT_STRIDE
"""Offset of the entries in the file, for the tests that damage it."""

"""A driver used as engines use it, by its own entry points: the real library, or the simulated one in its place."""

import ctypes
import time
from collections.abc import Iterator
from typing import Any

from tests.device.simulated import LIBRARY, Driver, Vendor, name_in
from tests.process.harness import WAIT_S

NOT_READY = 600
PORTABLE_AND_MAPPED = 3
BOUNCE_BYTES = 64 << 20
GRANULE_BYTES = 2 << 20
"""torch allocates in multiples of this, and a driver gives such memory its own block."""
TO_DEVICE, TO_HOST = 1, 2


class PlainDriver(Driver):
    """A driver for one thread. Host memory is copied through pinned memory, waiting for each piece."""

    def __init__(self, vendor: Vendor, library: str, ordinal: int = 0) -> None:
        """library: "" for the machine's own."""
        self.vendor = vendor
        self.granule_bytes = GRANULE_BYTES
        self._library = ctypes.CDLL(library or LIBRARY[vendor])
        self._check("init", 0)
        self.use(ordinal)
        self._stream = ctypes.c_void_p(self.stream())
        pinned = ctypes.c_void_p()
        self._check("host_alloc", ctypes.byref(pinned), ctypes.c_size_t(BOUNCE_BYTES), PORTABLE_AND_MAPPED)
        self._pinned = pinned.value or 0

    def alloc(self, size: int) -> int:
        return super().alloc(-(-size // self.granule_bytes) * self.granule_bytes)

    def host(self, address: int, size: int) -> Any:
        return DeviceView(self, address, size)

    def free_bytes(self) -> int:
        """Free bytes of the whole device, by the driver's count."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("memory_info", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def write(self, address: int, content: bytes) -> None:
        for at in range(0, len(content), BOUNCE_BYTES):
            piece = bytes(content[at : at + BOUNCE_BYTES])
            ctypes.memmove(self._pinned, piece, len(piece))
            self._copy(address + at, len(piece), TO_DEVICE)

    def read(self, address: int, size: int) -> bytes:
        pieces = []
        for at in range(0, size, BOUNCE_BYTES):
            length = min(BOUNCE_BYTES, size - at)
            self._copy(address + at, length, TO_HOST)
            pieces.append(ctypes.string_at(self._pinned, length))
        return b"".join(pieces)

    def _copy(self, address: int, size: int, way: int) -> None:
        device, host = ctypes.c_uint64(address), ctypes.c_void_p(self._pinned)
        to, source = (device, host) if way == TO_DEVICE else (host, device)
        if self.vendor == "rocm":
            self._check("copy_of_kind", to, source, ctypes.c_size_t(size), way, self._stream)
        else:
            field = "copy_to_device" if way == TO_DEVICE else "copy_to_host"
            self._check(field, to, source, ctypes.c_size_t(size), self._stream)
        due_s = time.monotonic() + WAIT_S
        query = self._library[name_in(self.vendor, "stream_query")]
        while (code := query(self._stream)) == NOT_READY:
            assert time.monotonic() < due_s, f"a copy of {size} bytes does not end"
        assert code == 0, f"stream_query: {code}"


class DeviceView:
    """Device memory that can be assigned, sliced and compared like a memoryview of bytes."""

    def __init__(self, driver: PlainDriver, address: int, size: int) -> None:
        self._driver = driver
        self._address = address
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __setitem__(self, where: slice, content: bytes) -> None:
        begin, end, _ = where.indices(self._size)
        assert end - begin == len(content), f"{len(content)} bytes do not fill [{begin}, {end})"
        self._driver.write(self._address + begin, content)

    def __getitem__(self, where: slice) -> bytes:
        begin, end, _ = where.indices(self._size)
        return self._driver.read(self._address + begin, max(0, end - begin))

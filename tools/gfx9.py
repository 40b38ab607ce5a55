"""Reads AMD's machine code of the GFX9 family (gfx90a, gfx942, gfx950): which instructions of a kernel touch memory.

A disassembler that knows no more than the length of every instruction, and the names of those that load and store. So
a code object can be held to what its listing said, and a committed one without any compiler.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

LITERAL, SDWA, DPP = 255, 249, 250
"""Operands that say: another word follows."""
SOPP_END = 0xBF810000

FLAT_SEGMENTS = ("flat", "scratch", "global")
FLAT_NAMES = {
    **dict(enumerate(("ubyte", "sbyte", "ushort", "sshort", "dword", "dwordx2", "dwordx3", "dwordx4"), 16)),
    24: "byte",
    26: "short",
    **dict(enumerate(("dword", "dwordx2", "dwordx3", "dwordx4"), 28)),
    96: "swap_x2",
    98: "add_x2",
}
FIRST_STORE, LAST_STORE = 24, 31  # atomics lie above
BUFFER_NAMES = {40: "wbl2", 41: "inv", 62: "wbinvl1", 63: "wbinvl1_vol"}
"""They write caches back or forget what is in them."""
DS_NAMES = {61: "swizzle_b32", 63: "bpermute_b32"}
WIDE_FORMATS = {
    0x30: "s_load",
    0x31: "exp",
    0x34: "",
    0x36: "ds",
    0x37: "flat",
    0x38: "buffer",
    0x3A: "tbuffer",
    0x3C: "image",
}
"""First six bits of the instructions of two words -> what they touch. 0x34 is VOP3: nothing."""


class CodeError(Exception):
    """The bytes are no kernel that this can read."""


def memory_instructions(code_object: bytes, kernel: str) -> list[str]:
    """In the order of the code: "global_load_dwordx4", "scratch_store_dword", "buffer_inv", "s_load" …"""
    words = _words_of(code_object, kernel)
    found = []
    at = 0
    while at < len(words):
        if words[at] == SOPP_END and not any(words[at + 1 :]):
            return found
        length = _length(words[at])
        if at + length > len(words):
            raise CodeError(f"{kernel}: an instruction of {length} words at {4 * at} leaves its {4 * len(words)} bytes")
        if name := _memory_name(words[at]):
            found.append(name)
        at += length
    if not words or words[-1] != SOPP_END:
        raise CodeError(f"{kernel}: it does not end with s_endpgm")
    return found


def _length(word: int) -> int:
    """Words of the instruction that begins with this one."""
    if word >> 26 in WIDE_FORMATS:
        return 2
    low, high = word & 0xFF, word >> 8 & 0xFF
    if word >> 31 == 0:  # VOP2, VOP1, VOPC: one source of nine bits
        always = word >> 25 in (0x17, 0x18, 0x24, 0x25)  # a constant in the middle of a multiply-add
        return 2 if always or word & 0x1FF in (LITERAL, SDWA, DPP) else 1
    if word >> 23 == 0x17D:  # SOP1
        return 2 if low == LITERAL else 1
    if word >> 23 == 0x17F:  # SOPP: sixteen bits of its own
        return 1
    if word >> 28 == 0xB and word >> 23 != 0x17E:  # SOPK: the same; s_setreg_imm32_b32 alone has a word behind it
        return 2 if word >> 23 & 0x1F == 20 else 1
    if word >> 30 == 2:  # SOP2, SOPC
        return 2 if LITERAL in (low, high) else 1
    raise CodeError(f"no instruction of this family begins with {word:#010x}")


def _memory_name(word: int) -> str:
    name = WIDE_FORMATS.get(word >> 26, "")
    if name == "ds":
        opcode = word >> 17 & 0xFF
        return f"ds_{DS_NAMES.get(opcode, opcode)}"
    if name == "buffer":
        opcode = word >> 18 & 0x7F
        return f"buffer_{BUFFER_NAMES.get(opcode, opcode)}"
    if name != "flat":
        return name
    opcode, segment = word >> 18 & 0x7F, word >> 14 & 3
    verb = "load" if opcode < FIRST_STORE else "store" if opcode <= LAST_STORE else "atomic"
    return f"{FLAT_SEGMENTS[segment]}_{verb}_{FLAT_NAMES.get(opcode, opcode)}"


# ---------------------------------------------------------------- ELF


class _Section(NamedTuple):
    kind: int
    address: int
    offset: int
    bytes: int
    link: int


DYNSYM = 11


def _words_of(code_object: bytes, kernel: str) -> tuple[int, ...]:
    """The kernel's code, found by its dynamic symbol."""
    sections = list(_sections(code_object))
    for table in sections:
        if table.kind != DYNSYM:
            continue
        names = sections[table.link]
        for at in range(table.offset, table.offset + table.bytes, 24):
            name_at, _, _, section, address, size = struct.unpack_from("<IBBHQQ", code_object, at)
            end = code_object.index(b"\0", names.offset + name_at)
            if code_object[names.offset + name_at : end] == kernel.encode():
                begin = address - sections[section].address + sections[section].offset
                return struct.unpack_from(f"<{size // 4}I", code_object, begin)
    raise CodeError(f"there is no {kernel}")


def _sections(code_object: bytes) -> Iterator[_Section]:
    if not code_object.startswith(b"\x7fELF\x02\x01"):
        raise CodeError("it is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", code_object, 40)
    entry_bytes, count = struct.unpack_from("<HH", code_object, 58)
    for index in range(count):
        fields = struct.unpack_from("<IIQQQQI", code_object, table + index * entry_bytes)
        _, kind, _, address, offset, size, link = fields
        yield _Section(kind, address, offset, size, link)

"""The kernels that were compiled ahead of time: complete, built from this source, and in a form that drivers accept."""

import hashlib
import importlib.util
import json
import re
import struct
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from tools.build_objects import BuildError, check_code
from tools.gfx9 import CodeError, memory_instructions

ROOT = Path(__file__).resolve().parents[3]
OBJECTS = ROOT / "csrc/gpu/kernels/objects"
MANIFEST = json.loads((OBJECTS / "MANIFEST.json").read_text())
ELF_AMDGPU = 224
AMD_FLAGS = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}
"""The architecture in an ELF header's flags."""


def test_objects_were_made_from_this_source() -> None:
    """To rebuild them: pip install '.[objects]', python -m tools.build_objects."""
    source = b"".join((ROOT / "csrc/gpu/kernels" / name).read_bytes() for name in ("piece.h", "kernel_source.h"))
    assert MANIFEST["source"] == hashlib.sha256(source).hexdigest()


def test_objects_are_those_of_the_manifest() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in OBJECTS.iterdir()}
    del found["MANIFEST.json"]
    assert found == MANIFEST["objects"]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the extra `objects` is not installed")
def test_the_same_compiler_makes_the_same_objects() -> None:
    command = [sys.executable, "-m", "tools.build_objects", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arch", "newest"), [("sm_80", (7, 4)), ("sm_90", (7, 8)), ("sm_100", (8, 6)), ("sm_120", (8, 7))]
)
def test_ptx_is_old_enough_for_the_drivers_of_its_devices(arch: str, newest: tuple[int, int]) -> None:
    text = (OBJECTS / f"kv_{arch.replace('_', '')}.ptx").read_text()
    version = re.search(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    assert version is not None
    assert tuple(map(int, version.groups())) <= newest
    assert f".target {arch}\n" in text
    for kernel in ("kv_gather", "kv_scatter", "kv_digest"):
        body = text[text.index(f".visible .entry {kernel}(") :]
        before_store = body[: body.index("st.global.L1::no_allocate.v4.u32")]
        assert before_store.count("ld.global.L1::no_allocate.v4.u32") == 4
    digest = text[text.index(".visible .entry kv_digest(") :].partition("\n}")[0]
    assert digest.count("ld.global.L1::no_allocate.v4.u32") == 5, "four in flight, and one for the rest"
    assert digest.count("st.global.L1::no_allocate.v4.u32") == 5
    assert digest.count("red.global.add.u64") == 1, "three lanes add at once"
    assert digest.count("shfl.sync.bfly.b32") == 2 * 5
    before = "red.global", "barrier.sync", "atom.release.gpu", "atom.global"  # the counter is reset as well
    after = "fence.acq_rel", "atom.global", "membar.sys"
    found = re.findall(
        r"red\.global|membar\.\w+|fence\.\w+|atom\.global|atom\.release\.\w+|bar\.warp\.sync|barrier\.sync", digest
    )
    in_order = [name for name, _ in groupby(found)]
    assert in_order == [*before, "bar.warp.sync", *after], "counted after adding, taken after all counted"


def entries() -> dict[str, bytes]:
    """Target -> object of the bundle."""
    blob = (OBJECTS / "kv_amd.hipfb").read_bytes()
    assert blob.startswith(b"__CLANG_OFFLOAD_BUNDLE__")
    (count,) = struct.unpack_from("<Q", blob, 24)
    found, at = {}, 32
    for _ in range(count):
        offset, size, name_bytes = struct.unpack_from("<QQQ", blob, at)
        name = blob[at + 24 : at + 24 + name_bytes].decode()
        assert offset % 4096 == 0
        assert offset + size <= len(blob)
        found[name] = blob[offset : offset + size]
        at += 24 + name_bytes
    return found


def test_the_bundle_has_an_object_for_each_amd_architecture() -> None:
    found = entries()
    assert found.pop("host-x86_64-unknown-linux-gnu-") == b""
    assert set(found) == {f"hipv4-amdgcn-amd-amdhsa--{arch}" for arch in AMD_FLAGS}
    for target, code in found.items():
        assert code.startswith(b"\x7fELF\x02\x01")
        assert code[8] == 3, "code object version 5"
        (machine,) = struct.unpack_from("<H", code, 18)
        (flags,) = struct.unpack_from("<I", code, 48)
        assert (machine, flags & 0xFF) == (ELF_AMDGPU, AMD_FLAGS[target.rpartition("--")[2]])
        assert b"kv_gather.kd\0" in code
        assert b"kv_scatter.kd\0" in code
        assert b"kv_digest.kd\0" in code


def codes() -> dict[str, bytes]:
    """Architecture -> AMD's machine code."""
    return {target.rpartition("--")[2]: code for target, code in entries().items() if code}


@pytest.mark.parametrize("arch", AMD_FLAGS)
def test_amd_code_of_the_digest_adds_to_its_numbers_when_its_lanes_have_added_up(arch: str) -> None:
    found = memory_instructions(codes()[arch], "kv_digest")
    assert found.count("global_atomic_add_x2") == 1 + 1, "three lanes at once, and one to the counter"
    assert found.count("global_atomic_swap_x2") == 3 + 1
    assert found.count("ds_swizzle_b32") == 2 * 5 + 1
    assert found.count("ds_bpermute_b32") >= 6, "the lanes read the list together"


@pytest.mark.parametrize("arch", AMD_FLAGS)
def test_amd_code_has_four_loads_under_way_in_each_width_and_spills_nothing(arch: str) -> None:
    """Disassembles the committed code itself."""
    check_code(arch, codes()[arch])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (0xDC5C8000, 0xDC508000, "no four loads of dwordx4"),  # a narrower load
        (0xDC5C8000, 0xDC5C0000, "has flat_load_dwordx4"),
        (0xDC7C8000, 0xDC7C4000, "has scratch_store_dwordx4"),
    ],
)
def test_slow_code_is_found(old: int, new: int, says: str) -> None:
    """0xdc5c8000 is the first word of global_load_dwordx4, 0xdc7c8000 that of its store, without their cache hints."""
    code = bytearray(codes()["gfx90a"])
    hints = 0x00030000
    for at in range(0, len(code) - 4, 4):
        (word,) = struct.unpack_from("<I", code, at)
        if word & ~hints == old:
            struct.pack_into("<I", code, at, new | (word & hints))
    with pytest.raises(BuildError, match=says):
        check_code("gfx90a", bytes(code))


def test_code_that_cannot_be_read_is_refused() -> None:
    code = codes()["gfx942"]
    with pytest.raises(CodeError, match="no kv_gather"):
        memory_instructions(code.replace(b"kv_gather\0", b"kv_father\0"), "kv_gather")
    begin = code.index(struct.pack("<I", 0xBF810000))
    with pytest.raises(CodeError, match=r"s_endpgm|begins with"):
        memory_instructions(code[:begin] + b"\0\0\xff\xff" + code[begin + 4 :], "kv_gather")

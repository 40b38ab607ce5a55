"""Compiles the kernels ahead of time into csrc/gpu/kernels/objects: `python -m tools.build_objects [--check]`.

Needs ziglang (the extra `objects`), whose clang compiles for both vendors without their toolkits. The same compiler
gives the same bytes, so --check compiles again and compares. Either way the code is read for what makes it fast: in
each width of copies four loads are under way before the first store, nothing is spilled, no address is flat
(unresolved). For NVIDIA that is PTX, for AMD the linked machine code, disassembled by gfx9.py and held against the
compiler's listing.
"""

import argparse
import hashlib
import importlib.metadata
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gfx9 import CodeError, memory_instructions

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "csrc/gpu/kernels/kernel_source.h"
PIECE = ROOT / "csrc/gpu/kernels/piece.h"
OBJECTS = ROOT / "csrc/gpu/kernels/objects"

PTX = {"sm_80": "ptx74", "sm_90": "ptx78", "sm_100": "ptx86", "sm_120": "ptx87"}
"""Architecture and the oldest PTX that has it, and the cache hints: drivers read older PTX, never newer."""
AMD = ("gfx90a", "gfx942", "gfx950")
BUNDLE = "kv_amd.hipfb"
COPIES = ("kv_gather", "kv_scatter")
DIGEST = "kv_digest"
WIDTHS = (("dwordx4", "dwordx4"), ("dwordx2", "dwordx2"), ("dword", "dword"), ("ushort", "short"), ("ubyte", "byte"))
"""How gfx9 names the loads and stores of 16, 8, 4, 2 and 1 bytes."""
BETWEEN_LANES = ("ds_swizzle_b32", "ds_bpermute_b32")
"""Lanes hand each other their sums and pieces by these. They touch no memory."""
FENCES = ("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol")
"""What fences do to caches."""
PAGE_BYTES = 4096


class BuildError(Exception):
    pass


def source_digest() -> str:
    return hashlib.sha256(PIECE.read_bytes() + SOURCE.read_bytes()).hexdigest()


def zig(*arguments: str | Path) -> None:
    """Runs one of its tools; PATH is not asked for other compilers' toolkits."""
    command = [sys.executable, "-m", "ziglang", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def compile_text(target: list[str], listing: Path) -> None:
    common = ["--cuda-device-only", "-O3", "-std=c++17", "-Wno-pragma-once-outside-header", "-Wno-unknown-cuda-version"]
    zig("clang", *target, *common, "-I", ROOT / "csrc", "-S", SOURCE, "-o", listing)


def ptx(arch: str, work: Path) -> bytes:
    listing = work / f"{arch}.ptx"
    version = f"--cuda-feature=+{PTX[arch]}"
    compile_text(["-x", "cuda", f"--cuda-gpu-arch={arch}", "-nocudainc", "-nocudalib", version], listing)
    text = listing.read_text()
    for kernel in (*COPIES, DIGEST):
        body = text[text.index(f".entry {kernel}(") :].partition("st.global.L1::no_allocate.v4.u32")[0]
        if len(re.findall(r"ld\.global\S*no_allocate\.v4\.u32", body)) < 4:
            raise BuildError(f"{arch}: {kernel} has fewer than 4 wide loads before a store")
    if ".local" in text:
        raise BuildError(f"{arch}: something lives in local memory")
    return text.encode()


def amd(arch: str, work: Path) -> bytes:
    listing, unlinked, linked = (work / f"{arch}{ending}" for ending in (".s", ".o", ".hsaco"))
    code_object = "-mcode-object-version=5"
    hip = ["-x", "hip", f"--offload-arch={arch}", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", code_object]
    compile_text([*hip, "-fuse-cuid=none"], listing)  # that would be a digest of paths, here and in the object
    zig("clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", code_object, "-c", listing, "-o", unlinked)
    zig("ld.lld", "-shared", "-s", unlinked, "-o", linked)
    code = linked.read_bytes()
    check_code(arch, code, listing.read_text())
    return code


def check_code(arch: str, code: bytes, listing: str = "") -> None:
    """Raises BuildError when a kernel of the object is slow, or is not what its listing says."""
    for kernel in (*COPIES, DIGEST):
        found = [name for name in memory_instructions(code, kernel) if not name.startswith("s_")]
        if bad := [name for name in found if not name.startswith("global_") and name not in (*BETWEEN_LANES, *FENCES)]:
            raise BuildError(f"{arch}: {kernel} has {bad[0]}")
        text = " ".join(found)
        for load, store in WIDTHS if kernel in COPIES else WIDTHS[:1]:
            if " ".join([f"global_load_{load}"] * 4 + [f"global_store_{store}"] * 4) not in text:
                raise BuildError(f"{arch}: {kernel} has no four loads of {load} before four stores")
        body = listing[listing.find(f"\n{kernel}:") : listing.find(f".size\t{kernel}")]
        if listing and re.findall(r"^\s+((?:flat|scratch|global|buffer|ds)_\w+)", body, re.MULTILINE) != found:
            raise BuildError(f"{arch}: the code of {kernel} is not what the compiler listed")


def bundle(codes: list[tuple[str, bytes]]) -> bytes:
    """clang's offload bundle, which HIP loads: a table of (offset, bytes, target), then the objects on page bounds."""
    entries = [("host-x86_64-unknown-linux-gnu-", b"")]
    entries += [(f"hipv4-amdgcn-amd-amdhsa--{arch}", code) for arch, code in codes]
    table_bytes = 32 + sum(24 + len(target) for target, _ in entries)
    begin = table_bytes + -table_bytes % PAGE_BYTES
    table = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries))
    body = b""
    for target, code in entries:
        table += struct.pack("<QQQ", begin + len(body), len(code), len(target)) + target.encode()
        body += code + bytes(-len(code) % PAGE_BYTES)
    return table + bytes(begin - len(table)) + body


def build() -> dict[str, bytes]:
    """File name -> content, the manifest included."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        files = {f"kv_{arch.replace('_', '')}.ptx": ptx(arch, work) for arch in PTX}
        files[BUNDLE] = bundle([(arch, amd(arch, work)) for arch in AMD])
    manifest = {
        "compiler": f"ziglang {importlib.metadata.version('ziglang')}",
        "source": source_digest(),
        "objects": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    return {**files, "MANIFEST.json": (json.dumps(manifest, indent=2) + "\n").encode()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a file is not what it would be"
    )
    arguments = parser.parse_args()
    try:
        files = build()
    except (BuildError, CodeError) as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.check:
        different = [name for name, content in files.items() if (OBJECTS / name).read_bytes() != content]
        print(f"{len(files)} files, different: {', '.join(different) or 'none'}")
        return 1 if different else 0
    OBJECTS.mkdir(exist_ok=True)
    for name, content in files.items():
        (OBJECTS / name).write_bytes(content)
        print(f"{name} {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

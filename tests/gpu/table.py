"""Builds tests/gpu/driver_table.cpp: the driver table and the kernels in one program, without Python."""

import fcntl
import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "driver_table"
ROOMS = ("library", "driver", "probe", "handles", "facts", "rtc", "code_cache", "objects", "kernels")
SOURCES = [
    ROOT / "tests/gpu/driver_table.cpp",
    *(ROOT / "csrc/gpu" / f"{room}.cpp" for room in ROOMS),
    ROOT / "csrc/check.cpp",
    ROOT / "csrc/checksum.cpp",
]


def build() -> Path:
    """The program's path; compiled when anything that it is made of has changed."""
    inputs = [*SOURCES, *sorted((ROOT / "csrc/gpu").glob("*.h")), *sorted((ROOT / "csrc/gpu/objects").iterdir())]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    program = BUILT / digest / "driver_table"
    program.parent.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            partial = program.with_suffix(".partial")
            flags = ["-O1", "-std=c++20", "-pthread", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}"]
            objects = f'-DKV_OBJECTS_DIR="{ROOT / "csrc/gpu/objects"}"'
            subprocess.run(["g++", *flags, objects, *map(str, SOURCES), "-ldl", "-o", str(partial)], check=True)
            partial.rename(program)
    return program

"""Builds tests/gpu/driver_table.cpp: the driver table and the kernels in one program, without Python."""

import fcntl
import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ("library", "driver", "probe", "handles", "facts")
KERNELS = ("rtc", "code_cache", "objects", "kernels")
BASE = ("check", "checksum", "digest", "sha256", "words")
PARTS = [
    *(ROOT / "csrc/gpu/driver" / f"{name}.cpp" for name in DRIVER),
    *(ROOT / "csrc/gpu/kernels" / f"{name}.cpp" for name in KERNELS),
    *(ROOT / "csrc/base" / f"{name}.cpp" for name in BASE),
]
"""What programs that use a driver are made of."""


def build() -> Path:
    """The program's path; compiles it if any of its sources has changed."""
    return build_program("driver_table", [ROOT / "tests/gpu/driver_table.cpp", *PARTS])


def build_program(name: str, sources: list[Path]) -> Path:
    """Builds a program from sources of the data plane; compiles changed sources, or all if a header has changed."""
    headers = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc/gpu/kernels/objects").iterdir()]
    folder = ROOT / "build" / "programs" / _digest(sorted(headers))
    program = folder / f"{name}-{_digest(sources)}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda source: _compiled(source, folder), sources))
            _made(program, [*map(str, objects), "-ldl"])
    return program


def _compiled(source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}-{_digest([source])}.o"
    if not made.exists():
        objects = f'-DKV_OBJECTS_DIR="{ROOT / "csrc/gpu/kernels/objects"}"'
        _made(
            made,
            ["-O1", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/vendor'}", objects, "-c", str(source)],
        )
    return made


def _made(target: Path, arguments: list[str]) -> None:
    partial = target.with_suffix(".partial")
    subprocess.run(["g++", "-std=c++20", "-pthread", *arguments, "-o", str(partial)], check=True)
    partial.rename(target)


def _digest(paths: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]

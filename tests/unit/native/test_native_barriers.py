"""Barriers between memory accesses, checked in the compiler's output.

A run on x86-64 cannot show that one is missing: the processor reorders too little, and both sides would have to meet
within nanoseconds. So only this test notices a deleted barrier."""

import functools
import platform
import re
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
FULL_BARRIER = re.compile(r"\bmfence\b|\block;?\s+(or|add|xchg)")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86-64")


@functools.cache
def functions_of(source: str) -> dict[str, str]:
    """Symbol -> its instructions, compiled as the module is, with any parts that the compiler moved elsewhere."""
    command = ["g++", "-std=c++20", "-O2", "-D_GNU_SOURCE", f"-I{CSRC}", "-S", "-o", "-", str(CSRC / source)]
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, str] = {}
    name = ""
    for line in assembly.splitlines():
        if label := re.match(r"(_Z\w+)(\.\w+)*:", line):
            name = label[1]
        elif not line.lstrip().startswith("."):
            functions[name] = functions.get(name, "") + line + "\n"
    return functions


def test_non_temporal_stores_are_followed_by_a_store_fence() -> None:
    """Only the fence orders them before the word that marks the job as done."""
    streaming = {name: text for name, text in functions_of("copy/copy_kernels.cpp").items() if "movnt" in text}
    assert streaming
    for name, text in streaming.items():
        assert "sfence" in text, name
        assert text.rindex("movnt") < text.rindex("sfence"), name


@pytest.mark.parametrize("method", ["clear", "drop_namespace", "put_namespace"])
def test_a_withdrawn_ledger_entry_is_followed_by_a_full_barrier(method: str) -> None:
    """New bytes in the slot must not be visible before the entry is gone."""
    mangled = f"_ZN2kv6Ledger{len(method)}{method}E"
    (text,) = (text for name, text in functions_of("arena/ledger.cpp").items() if name.startswith(mangled))
    assert FULL_BARRIER.search(text), text

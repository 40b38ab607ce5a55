"""The search for the GPU kernel compiler among installed packages, and the packages of the extra `cuda`."""

import sys
import tomllib
from pathlib import Path

import pytest

from kvserver.transfer.device import NVRTC_WHEELS, rtc_library

ROOT = Path(__file__).resolve().parents[3]
PACKAGE_OF = {
    "nvidia/cu13/lib/libnvrtc.so.13": "nvidia-cuda-nvrtc",
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12": "nvidia-cuda-nvrtc-cu12",
}
"""The package of each file, as the packages' own file lists name it."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with packages."""
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    return tmp_path


def install(site: Path, name: str) -> str:
    path = site / name
    path.parent.mkdir(parents=True)
    path.touch()
    return str(path)


@pytest.mark.parametrize("name", NVRTC_WHEELS)
def test_a_compiler_that_a_package_brought_is_found(site: Path, name: str) -> None:
    assert rtc_library("cuda", "") == ""
    path = install(site, name)
    assert rtc_library("cuda", "") == path


def test_the_newer_of_two_compilers_is_taken(site: Path) -> None:
    newer, _ = [install(site, name) for name in NVRTC_WHEELS]
    assert rtc_library("cuda", "") == newer


@pytest.mark.parametrize(("kind", "library"), [("cuda", "/opt/libcuda.so.1"), ("rocm", "")])
def test_other_compilers_are_left_to_the_native_side(site: Path, kind: str, library: str) -> None:
    """The native side looks beside a named driver's library, and ROCm always has it beside its own."""
    install(site, NVRTC_WHEELS[0])
    assert rtc_library(kind, library) == ""


def test_the_extra_brings_a_compiler_that_is_looked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert PACKAGE_OF.keys() == set(NVRTC_WHEELS)
    assert [text.split(">=")[0] in PACKAGE_OF.values() for text in extras["cuda"]] == [True]
    assert {"vllm", "torch", "dev", "rocm"} <= extras.keys()

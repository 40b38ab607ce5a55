"""The report of `kvserver doctor`: what is in it, what is not, and what it does when something cannot be found out."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvserver.cli.doctor import peers, report
from kvserver.cli.doctor.doctor import Finding
from kvserver.config.config import Config
from kvserver.errors import ConfigError, ResourceError

FINDINGS = [Finding("ok", "python", "CPython"), Finding("fail", "socket", "taken\nby another")]


def status(_socket: str) -> dict[str, Any]:
    return {"pid": 4711, "movers": [{"device": "host"}], "text": "x" * 5000}


def sections(text: str) -> dict[str, list[str]]:
    parts = [part.splitlines() for part in text.split("== ")[1:]]
    return {name: [line for line in lines if line] for name, *lines in parts}


def test_it_has_findings_configuration_and_status_line_by_line() -> None:
    found = sections(report.text_of(Config(arena_bytes=5 << 20), {"arena_bytes": "--arena-bytes"}, FINDINGS, status))
    assert found["findings"] == ["ok python: CPython", "fail socket: taken by another"]
    assert 'arena_bytes = "5MiB" # --arena-bytes' in found["configuration"]
    assert found["server"][:2] == ["pid: 4711", 'movers: [{"device": "host"}]']
    assert found["server"][2].endswith("… (5008 characters)")
    assert any(line.startswith("processor ") for line in found["machine"])


def test_without_a_server_it_says_so() -> None:
    def absent(socket: str) -> dict[str, Any]:
        raise ResourceError("server-absent", f"no server listens at {socket}")

    found = sections(report.text_of(Config(socket="/s"), {}, FINDINGS, absent))
    assert found["server"] == ["none: no server listens at /s"]


def test_of_the_environment_it_tells_settings_of_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"HIP_VISIBLE_DEVICES": "0,1", "HSA_ENABLE_IPC_MODE_LEGACY": "1", "PYTORCH_HIP_ALLOC_CONF": "x:y"}
    kept = {"HF_TOKEN": "hf_abc", "AWS_SECRET_ACCESS_KEY": "def", "MY_HSA_KEY": "ghi", "VLLM_API_KEY": "jkl"}
    for name, value in (told | kept).items():
        monkeypatch.setenv(name, value)
    text = report.text_of(Config(), {}, FINDINGS, status)
    lines = sections(text)["settings of this process"]
    assert {f"{name}={value}" for name, value in told.items()} <= set(lines)
    assert not [name for name, value in kept.items() if name in text or value in text]


def test_a_section_that_cannot_be_found_out_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr(report, "read_memory", refused)
    found = sections(report.text_of(Config(), {}, FINDINGS, status))
    assert found["machine"][-1] == "cannot be found out: [Errno 13] not allowed"
    assert found["server"]


def test_of_an_engines_arguments_it_tells_no_more_than_a_name(tmp_path: Path) -> None:
    program = "token = 'hf_SECRET'; run({'cudagraph_mode': 'NONE'}, prompt='private')"
    for arguments, said in (
        (["python", "-c", program], "cudagraph_mode none"),
        (["vllm", "serve", "--enforce-eager"], "--enforce-eager"),
        (
            ["vllm", "serve", '--compilation-config={"cudagraph_mode": "NONE", "key": "hf_SECRET"}'],
            "cudagraph_mode none",
        ),
    ):
        (told,) = peers.slow_settings(peers.Peer(7, "engine", arguments, {}))
        assert f"runs with {said}: " in told
        assert "SECRET" not in told
        assert "private" not in told


def test_bytes_that_are_no_text_are_written_as_they_can_be(tmp_path: Path) -> None:
    report.write(tmp_path / "report", "a\udcffb")
    assert (tmp_path / "report").read_bytes() == b"a\\udcffb"


def test_a_device_in_place_of_a_file_keeps_its_mode() -> None:
    mode = os.stat("/dev/null").st_mode
    report.write(Path("/dev/null"), "text")
    assert os.stat("/dev/null").st_mode == mode


def test_its_file_is_for_this_user_alone_and_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    report.write(tmp_path / "report", "text")
    assert (tmp_path / "report").read_text() == "text"
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="no/report cannot be written: No such file"):
        report.write(tmp_path / "no" / "report", "text")

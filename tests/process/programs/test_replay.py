"""`kvserver replay` with a real server and real worker processes, small, also when processes die under it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.replay.options import Arm, ReplayOptions
from benchmarks.replay.progress import Progress
from benchmarks.replay.result import ReplayResult
from benchmarks.replay.run import run
from kvserver.errors import ResourceError
from tests.process.harness import Server, command_of, is_gone, pids_below, until
from tests.process.programs.replays import SMALL, TOO_SMALL


def _quiet(_: Progress) -> None:
    pass


def _replay(options: ReplayOptions, when_ended: int, act: Callable[[], None]) -> ReplayResult:
    """Runs a replay, and calls `act` once as soon as `when_ended` requests have ended."""
    acted = False

    def watch(progress: Progress) -> None:
        nonlocal acted
        if not acted and progress.requests_ended >= when_ended:
            acted = True
            act()

    result = run(options, watch)
    assert acted
    return result


def _below(parent: int, word: str) -> list[int]:
    return [pid for pid in pids_below(parent) if word in command_of(pid)]


def _children(word: str) -> list[int]:
    return _below(os.getpid(), word)


def _leaves_nothing() -> bool:
    return not _children("kvserver") and not _children("spawn_main")


@pytest.fixture(scope="module")
def arenas() -> ReplayResult:
    """The same replay with an arena that holds everything, and with one that does not."""
    result = run(replace(SMALL, arms=(Arm("large"), Arm("small", ("--arena-bytes", str(1 << 20))))), _quiet)
    assert result.problems == []
    assert _leaves_nothing()
    return result


def test_small_replay_moves_bytes_between_workers_and_all_are_right(arenas: ReplayResult) -> None:
    arm = arenas.arms[0]
    assert arm.requests == 150
    assert arm.hbm_tokens + arm.retrieved_tokens + arm.computed_tokens == arm.prompt_tokens
    assert arm.compared_bytes == arm.retrieve.bytes > 1_000_000
    assert 0 < arm.foreign_tokens < arm.retrieved_tokens
    assert arm.ttft.alone.mean < arm.ttft_hbm_only.alone.mean
    assert arm.disk is None
    assert arm.server["evictions"] == 0
    assert arm.server["chunks stored"] == arm.server["chunks held"]


def test_tiny_arena_evicts_and_every_byte_is_right(arenas: ReplayResult) -> None:
    large, small = arenas.arms
    assert small.server["evictions"] != 0
    assert small.retrieved_tokens < large.retrieved_tokens
    assert small.wrong_bytes == 0


@pytest.fixture(scope="module")
def without_and_with_disk(tmp_path_factory: pytest.TempPathFactory) -> ReplayResult:
    """A replay with DRAM alone, and one with an NVMe tier in a folder of the test."""
    folder = tmp_path_factory.mktemp("disk")
    result = run(replace(TOO_SMALL, disk_dir=folder), _quiet)
    assert result.problems == []
    assert not list(folder.iterdir()), "its directory is removed"
    return result


def test_disk_gives_back_what_a_small_arena_lost(without_and_with_disk: ReplayResult) -> None:
    dram, nvme = without_and_with_disk.arms
    assert dram.disk_tokens == 0
    assert nvme.disk_tokens > 0
    assert nvme.retrieved_tokens > dram.retrieved_tokens
    assert nvme.from_disk.bytes == 16 * nvme.disk_tokens
    assert nvme.disk is not None
    assert nvme.disk.read_bytes >= nvme.from_disk.bytes
    assert 0 < nvme.disk.used_bytes <= nvme.disk.total_bytes <= 40 << 20


def test_killed_server_finds_on_disk_what_another_one_lost(tmp_path: Path) -> None:
    result = run(replace(TOO_SMALL, disk_dir=tmp_path, restart_after=100), _quiet)
    dram, nvme = result.arms
    assert result.problems == []
    for arm in (dram, nvme):
        assert arm.requests == 150
        assert arm.restart is not None
        assert arm.restart.before.prompt_tokens + arm.restart.after.prompt_tokens == arm.prompt_tokens
    assert nvme.disk is not None
    assert nvme.disk.recovered > 0
    assert nvme.restart is not None
    assert nvme.restart.after.disk_tokens > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("admission", ["all", "second-touch"])
def test_daily_write_budget_holds_in_a_replay_that_would_exceed_it_ten_times(
    tmp_path: Path, without_and_with_disk: ReplayResult, admission: str
) -> None:
    free, disk_arm = without_and_with_disk.arms[1], TOO_SMALL.arms[1]
    assert free.disk is not None
    at_once_bytes = free.disk.written_bytes // 10
    budget = ("--disk-daily-write-bytes", str(24 * at_once_bytes), "--disk-admission", admission)
    frugal_arm = Arm("frugal", disk_arm.serve_flags + budget)
    frugal = run(replace(TOO_SMALL, disk_dir=tmp_path, arms=(frugal_arm,)), _quiet).arms[0]
    assert frugal.disk is not None
    refilled_bytes = 24 * at_once_bytes * (frugal.wall_s + TOO_SMALL.start_s_max) / 86_400
    assert 0 < frugal.disk.written_bytes <= at_once_bytes + refilled_bytes
    assert frugal.disk.refused["budget"] + frugal.disk.refused["second-touch"] > 0
    assert frugal.wrong_bytes == free.wrong_bytes == 0


def test_disk_directory_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as refusal:
        run(replace(TOO_SMALL, disk_dir=tmp_path / "absent", arms=TOO_SMALL.arms[1:]), _quiet)
    assert refusal.value.code == "disk-dir"
    assert _leaves_nothing()


def test_server_of_the_user_is_used_and_left_running(server: Server) -> None:
    options = replace(SMALL, socket=server.path)
    first = run(options, _quiet)
    second = run(options, _quiet)
    assert first.problems == second.problems == []
    assert second.arms[0].retrieved_tokens > first.arms[0].retrieved_tokens  # the first's chunks are still there
    until("the replay's sessions to end", lambda: server.status().sessions <= 1)


def test_server_that_is_killed_is_a_problem_and_the_engines_go_on() -> None:
    def kill_server() -> None:
        (server,) = _children("kvserver serve")
        os.kill(server, signal.SIGKILL)

    result = _replay(SMALL, 20, kill_server)
    assert result.exit_code == 1
    assert "the server exited with -9" in result.problems[0]
    assert result.arms[0].requests == 150
    assert result.arms[0].wrong_bytes == 0
    assert _leaves_nothing()


def test_worker_that_is_killed_ends_the_replay_with_a_problem() -> None:
    def kill_worker() -> None:
        os.kill(_children("spawn_main")[0], signal.SIGKILL)

    result = _replay(SMALL, 20, kill_worker)
    assert result.exit_code == 1
    assert "worker-died" in result.problems[0]
    assert _leaves_nothing()


def test_server_that_cannot_start_is_one_error_with_its_own_words() -> None:
    with pytest.raises(ResourceError) as refusal:
        run(replace(SMALL, arms=(Arm("broken", ("--no-such-flag",)),)), _quiet)
    assert refusal.value.code == "server-start"
    assert "no-such-flag" in refusal.value.message
    assert _leaves_nothing()


def test_replay_that_is_killed_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "kvserver", "replay", "--requests", "0", "--arena-bytes", "16MiB"]
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # for its files; socket paths are short
        replay = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder}, stderr=subprocess.PIPE)
        try:
            server = until("the server", lambda: _below(replay.pid, "kvserver serve"))
            workers = until("both workers", lambda: (found := _below(replay.pid, "spawn_main"))[1:] and found)
            movers = until("the server's processes", lambda: (found := pids_below(server[0]))[1:] and found)
        finally:
            replay.kill()
            replay.communicate()
        for pid in (*server, *workers, *movers):
            until(f"process {pid} to end", lambda pid=pid: is_gone(pid))

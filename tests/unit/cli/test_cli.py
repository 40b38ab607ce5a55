"""The command line: its output, the stream for it, and the exit status. No test here starts a server."""

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvserver.cli import main, server_connection
from kvserver.cli.doctor import doctor
from kvserver.cli.doctor.doctor import Finding
from kvserver.cli.status_text import overview
from kvserver.cli.values import option_value
from kvserver.config.config import KEYS, Config, example
from kvserver.errors import ConfigError, ResourceError
from kvserver.movers.remote_store import MOONCAKE, OBJECTS, VALKEY
from kvserver.sizing.options import SizingOptions
from kvserver.units import MIB
from kvserver.wire.status import CacheStatus, SessionStatus
from tests.rigs.brain_rig import FULL, NAMESPACE, WINDOW, Client, Rig
from tests.rigs.status_document import a_status

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 60


def kvserver(*arguments: str, optimize: bool = False) -> "subprocess.CompletedProcess[str]":
    """The command as a process, with its outer error handling."""
    command = [sys.executable, *(["-O"] if optimize else []), "-m", "kvserver", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)


def output(*arguments: str, status: int = 0) -> str:
    """The command within this process; errors that only the outer handling turns into messages are raised here."""
    done = CliRunner().invoke(main.app, list(arguments), catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


# ---------------------------------------------------------------- the edge


def test_a_configuration_error_is_one_line_and_exit_2() -> None:
    done = kvserver("config", "--jobs-max", "0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "kvserver: config-range: jobs_max=0 must be in [1, 4096] (jobs_max from --jobs-max)\n"


def made(program: typer.Typer) -> dict[str, tuple[list[tuple[str | None, list[str], object]], dict[str, object]]]:
    """Commands of a program: the options of each, and what is below it."""
    commands = typer.main.get_command(program).commands  # type: ignore[attr-defined]
    return {
        name: (
            [(option.name, option.opts, getattr(option, "help", "")) for option in command.params],
            {below: len(inner.params) for below, inner in getattr(command, "commands", {}).items()},
        )
        for name, command in commands.items()
    }


def test_a_start_makes_the_command_alone_that_is_asked_for() -> None:
    all_commands = made(main.app)
    assert {"serve", "config", "kvsize", "admin", "remote"} < set(all_commands)
    for name, command in all_commands.items():
        assert made(main.asked_for([name, "--help"])) == {name: command}
    assert made(main.app) == all_commands, "the whole stays as it is"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version", "serve"], ["srve"], [""]])
def test_all_commands_are_there_when_none_is_named(arguments: list[str]) -> None:
    assert main.asked_for(arguments) is main.app


ABORTS_AS_PYTHON_ENDS = """
import atexit, os, sys, types
import typer
from kvserver.cli.main import leave, run_command

module, status = sys.argv[1:]
del sys.argv[1:]
sys.modules[module] = types.ModuleType(module)
atexit.register(os.abort)
app = typer.Typer()

@app.command()
def command():
    print("the result")
    raise typer.Exit(int(status))

leave(run_command(app, "command"))
"""


NOT_WRITTEN = "kvserver: output: the result was not written whole: No space left on device\n"


def ending(module: str, status: int, stdout: int | TextIO = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    """The end of such a process, whose output is kept until it is full or flushed."""
    command = [sys.executable, "-c", ABORTS_AS_PYTHON_ENDS, module, str(status)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=environment,
        check=False,
    )


@pytest.mark.parametrize("module", [library.module for library in (VALKEY, OBJECTS, MOONCAKE)])
@pytest.mark.parametrize("status", [0, 1])
def test_a_command_with_a_client_of_a_store_ends_with_its_own_status(module: str, status: int) -> None:
    """Threads of such a client would abort a Python that ends in the usual way."""
    done = ending(module, status)
    assert (done.returncode, done.stdout, done.stderr) == (status, "the result\n", "")


def test_a_result_that_a_full_disk_did_not_take_is_no_success() -> None:
    with open("/dev/full", "w") as full:
        done = ending(OBJECTS.module, 0, full)
    assert (done.returncode, done.stderr) == (1, NOT_WRITTEN)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--help"]])
def test_a_full_disk_behind_the_output_is_told_in_one_line(arguments: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "kvserver", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            cwd=ROOT,
            env=environment,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, NOT_WRITTEN)


def test_a_reader_that_wants_no_more_hears_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        done = ending(OBJECTS.module, 0, gone)
    assert (done.returncode, done.stderr) == (1, "")


def test_bytes_that_are_no_text_are_refused() -> None:
    command: list[str | bytes] = [sys.executable, "-m", "kvserver", "explain", b"\xff"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvserver: argument: the command line has bytes that are not text in UTF-8\n"


def test_an_unknown_flag_exits_2_and_names_what_it_may_have_meant() -> None:
    done = kvserver("serve", "--arena-byte", "1")
    assert done.returncode == 2
    assert "--arena-bytes" in done.stderr


def test_the_server_refuses_to_run_without_assertions() -> None:
    done = kvserver("serve", "--socket", "/nonexistent/kv.sock", optimize=True)
    assert done.returncode == 2
    assert done.stderr.startswith("kvserver: python-optimized: ")


def test_without_the_native_module_serve_says_so_and_exits_2(tmp_path: Path) -> None:
    """A copy of the pure Python files, as an installation on the wrong platform would be."""
    package = tmp_path / "kvserver"
    for path in (ROOT / "kvserver").rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            target = package / path.relative_to(ROOT / "kvserver")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    script = "; ".join(
        [
            "import sys",
            f"sys.path[:0] = [{str(tmp_path)!r}]",
            "sys.meta_path = [finder for finder in sys.meta_path if 'ditable' not in repr(finder)]",
            "from kvserver.cli.main import main",
            "main()",
        ]
    )
    for command, status in (("serve", 2), ("doctor", 1)):
        arguments = [sys.executable, "-Pc", script, command, "--socket", str(tmp_path / "s"), "--http-port", "0"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == status, done.stderr
        if command == "serve":
            assert done.stderr.startswith("kvserver: native-module: ")
        else:
            assert "fail  native module" in done.stdout
            assert "kvserver._native cannot be loaded" in done.stdout


def test_an_unforeseen_error_is_a_traceback_and_called_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvserver"])
    assert main.run_command(raising(ZeroDivisionError("seven")), "kvserver") == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError: seven" in said
    assert said.endswith("kvserver: this is a bug in kvserver; the lines above belong in its report\n")


@pytest.mark.parametrize(("error", "status"), [(ConfigError("a", "b"), 2), (ResourceError("a", "b"), 1)])
def test_foreseen_errors_have_no_traceback(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvserver"])
    assert main.run_command(raising(error), "kvserver") == status
    assert capsys.readouterr().err == "kvserver: a: b\n"


def raising(error: Exception) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    return app


def test_version_and_help_load_nothing_heavy() -> None:
    script = "\n".join(
        [
            "import runpy, sys",
            "try: runpy.run_module('kvserver', run_name='__main__')",
            "finally: print(*sys.modules)",
        ]
    )
    heavy = {
        "zmq",
        "uvloop",
        "rich",
        "asyncio",
        "prometheus_client",
        "kvserver._native",
        "kvserver.brain.process",
        "kvclient",
    }
    for argument in ("--help", "--version"):
        command = [sys.executable, "-c", script, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT, check=False)
        assert done.stdout.startswith(("Usage: kvserver", "kvserver 0."))
        assert heavy & set(done.stdout.split()) == set()


# ---------------------------------------------------------------- config


def test_config_prints_a_file_that_means_the_same(tmp_path: Path) -> None:
    printed = output("config", "--arena-bytes", "1001MiB", "--log-format", "json")
    assert 'log_format = "json"' in printed
    assert "# --arena-bytes, rounded down from" in printed
    path = tmp_path / "again.toml"
    path.write_text(printed)
    first = output("config", "--json", "--arena-bytes", "1001MiB", "--log-format", "json")
    again = output("config", "--json", "--config", str(path))
    values = [{name: said["value"] for name, said in json.loads(text).items()} for text in (first, again)]
    assert values[0] == values[1]
    assert values[0]["arena_bytes"] == 31 * 32 * MIB
    assert json.loads(again)["jobs_max"]["origin"].startswith(f"{path}:")


def test_config_example_is_the_shipped_file() -> None:
    assert output("config", "--example") == example()


def test_every_key_is_a_flag_of_serve_with_its_default_and_meaning() -> None:
    shown = " ".join(output("serve", "--help").split())
    for key in KEYS:
        assert f" {key.flag} " in shown, key.name
        assert key.about.text.split(".")[0].split("-")[0] in shown, key.name


def test_serve_runs_the_supervisor_with_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    class Supervisor:
        @staticmethod
        def run(config: Config) -> int:
            seen.append(config)
            return 7

    monkeypatch.setitem(sys.modules, "kvserver.supervisor.supervisor", Supervisor)
    monkeypatch.setattr("kvserver.supervisor.supervisor", Supervisor, raising=False)
    monkeypatch.setattr("kvserver.logs.start", lambda **settings: None)
    output("serve", "--arena-bytes", "3MiB", "--socket", "/x/y", status=7)
    assert (seen[0].arena_bytes, seen[0].socket) == (3 * MIB, "/x/y")


def test_serve_logs_a_size_that_it_had_to_round(tmp_path: Path) -> None:
    (tmp_path / "kv.sock").mkdir()  # no socket: the server cannot start, and prints everything that comes before that
    flags = ("--arena-bytes=3000000", "--slab-bytes=1MiB", "--http-port=0", "--log-format=json")
    done = kvserver("serve", f"--socket={tmp_path}/kv.sock", *flags)
    first = json.loads(done.stderr.splitlines()[0])
    assert (done.returncode, first["event"], first["arena_bytes"]) == (2, "size rounded", 2 * MIB)
    assert first["origin"] == "--arena-bytes, rounded down from 3000000 bytes"


# ---------------------------------------------------------------- status


def test_status_shows_the_document_and_json_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(socket: str) -> object:
        asked.append(socket)
        return msgspec.to_builtins(a_status(slabs_ready=2, problem="out of memory"))

    monkeypatch.setattr(main, "_ask_status", answer)
    text = output("status", "--socket", "/x/kv.sock")
    assert "kvserver 7.5.3, up 0 min 1 s, incarnation 11" in text
    assert "4KiB used of 16KiB ready of 40KiB, slabs 2 of 5 x 8KiB" in text
    assert "stopped growing: out of memory" in text
    assert "host" in text
    assert json.loads(output("status", "--socket", "/x/kv.sock", "--json"))["chunks"] == 13
    assert asked == ["/x/kv.sock"] * 2


def test_an_overview_shows_counts_that_are_not_zero_and_whose_caches_there_are() -> None:
    session = SessionStatus(session=3, engine="vllm", epoch=1, rank=2, software="x", attached=True, caches=1, jobs=0)
    cache = CacheStatus(
        cache=9,
        name="kv",
        session=3,
        owner="vllm rank 2",
        namespace="ab" * 32,
        mover=1,
        mode="direct",
        state="mapped",
        jobs=5,
    )
    status = msgspec.structs.replace(
        a_status(),
        counters={"lookups": 1234, "stores": 0, "errors": {"request": 2, "device": 0}, "jobs": {"done": 0}},
        shown_sessions=[session],
        shown_caches=[cache],
        caches=65,
    )
    lines = overview(status)
    assert "counted   lookups 1,234" in lines
    assert "counted   errors: 2 request" in lines
    assert not any("stores 0" in line or "jobs:" in line for line in lines)
    assert any(line.split() == ["kv", "vllm", "rank", "2", "abababababab", "direct", "mapped", "5"] for line in lines)
    assert lines[-1] == "and 1 more caches"


def test_describe_lists_the_groups_of_each_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(main, "_ask_status", lambda _socket: msgspec.to_builtins(rig.service.status(rig.now_ns)))
    assert output("describe") == "no engine has registered a cache\n"
    Client(rig, engine="llama").register([FULL, WINDOW])
    lines = [line.split("  ") for line in output("describe").splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert cells[0] == ["cache kv of llama rank 0: direct, mapped, chunks of 6 tokens, 151B a token"]
    assert cells[1] == [f"namespace {NAMESPACE.hex()}"]
    assert cells[3:5] == [
        ["0", "full", "11 of 2 tokens", "2 of 129B", "0 of 1", "774B"],
        ["1", "window of 7 tokens", "7 of 3 tokens", "1 of 65B", "0 of 1", "130B"],
    ]


def test_status_without_a_server_does_not_wait_and_names_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "STATUS_S", 3600)
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))
    for path in (tmp_path / "absent", left):
        with pytest.raises(ResourceError, match=f"no server listens at {path}"):
            main._ask_status(str(path))


def test_status_names_the_process_that_listens_and_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "STATUS_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        with pytest.raises(
            ResourceError, match=f"process {os.getpid()} listens at {tmp_path}/silent and does not answer"
        ):
            main._ask_status(str(tmp_path / "silent"))


# ---------------------------------------------------------------- doctor


def test_doctor_prints_a_line_a_check_and_fails_when_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("ok", "python", "fine"), Finding("warn", "open files", "few")]
    monkeypatch.setattr(doctor, "examine", lambda config: findings)
    assert output("doctor").splitlines() == ["ok    python      fine", "warn  open files  few"]
    findings.append(Finding("fail", "memory", "none"))
    assert output("doctor", status=1).splitlines()[-1] == "fail  memory      none"
    assert json.loads(output("doctor", "--json", status=1))[2] == {"verdict": "fail", "check": "memory", "text": "none"}


# ---------------------------------------------------------------- replay and bench


def test_size_flags_repeat_the_defaults_of_its_options() -> None:
    defaults = SizingOptions()
    for flag in main.SIZE_FLAGS:
        if flag.name != "arena_bytes":
            assert option_value(SizingOptions, flag.name, flag.default) == getattr(defaults, flag.name), flag.name


def test_an_option_that_is_no_number_is_refused() -> None:
    wrong = (
        ("requests", "many", "a whole number"),
        ("token_bytes", "8KB", "bytes such as"),
        ("think_s_max", "", "a number"),
    )
    for name, text, expected in wrong:
        with pytest.raises(ConfigError, match=f"{name}='{text}' must be {expected}"):
            option_value(SizingOptions, name, text)


def test_replay_says_where_it_works_when_there_is_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(main, "CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match=f"part of a checkout, not of an installation; there is no {tmp_path}/bench"):
        output("replay", "--requests", "7")


def test_replay_passes_on_its_arguments_and_exit_status_and_stays_in_the_users_folder(tmp_path: Path) -> None:
    replay = tmp_path / "checkout" / "benchmarks" / "replay"
    replay.mkdir(parents=True)
    (replay / "__main__.py").write_text("import os, sys; print([*sys.argv[1:], os.getcwd()]); sys.exit(3)")
    (replay.parent / "__init__.py").touch()
    fake = f"from pathlib import Path; main.CHECKOUT = Path({str(tmp_path / 'checkout')!r})"
    command = [sys.executable, "-c", f"from kvserver.cli import main; {fake}; main.main()", "replay"]
    asked = ["--arm", "two: --arena-bytes 3MiB", "--json", "--help"]
    done = subprocess.run([*command, *asked], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert ast.literal_eval(done.stdout) == [*asked, str(tmp_path)]


def test_bench_refuses_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'speed' is none of service, host, start"):
        output("bench", "speed")
    monkeypatch.setattr(main, "CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match="part of a checkout"):
        output("bench", "host")


def test_bench_passes_its_arguments_and_exit_status_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "bench_host.py").write_text(
        "import sys, pathlib; pathlib.Path('said').write_text(repr(sys.argv[1:])); sys.exit(3)"
    )
    monkeypatch.setattr(main, "CHECKOUT", tmp_path)
    output("bench", "host", "--", "--json", "--smoke", status=3)
    assert ast.literal_eval((tmp_path / "said").read_text()) == ["--json", "--smoke"]


def test_every_command_has_help() -> None:
    for command in main.app.registered_commands:
        assert command.callback is not None
        assert (command.callback.__doc__ or "").strip().count("\n") == 0
    names = {
        typer.main.get_command_name(c.name or c.callback.__name__) for c in main.app.registered_commands if c.callback
    }
    assert names == {
        "serve",
        "config",
        "describe",
        "disk",
        "doctor",
        "explain",
        "kvsize",
        "status",
        "top",
        "replay",
        "size",
        "bench",
    }
    assert os.path.exists(main.CHECKOUT / "pyproject.toml")

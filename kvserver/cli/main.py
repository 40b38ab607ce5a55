"""The `kvserver` command. Results go to standard output, everything else to standard error.

Exit status: 0 done; 1 it was tried and failed; 2 the command or the configuration is wrong. Each command imports its
modules when it runs, so that --help and a start do not wait for modules that they do not use.
"""
# ruff: noqa: PLC0415

import copy
import errno
import functools
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

import kvserver
from kvserver.cli import admin, remote
from kvserver.cli.server_connection import ask_status as _ask_status
from kvserver.cli.server_connection import connected as _client
from kvserver.cli.values import option_value, plot_file, seconds, whole
from kvserver.config.config import KEYS, RENAMED, Config, example, load
from kvserver.config.keys import Key
from kvserver.config.paths import default_socket
from kvserver.errors import ConfigError, KvError, ResourceError

CHECKOUT = Path(kvserver.__file__).resolve().parent.parent
BENCHES = ("service", "host", "start", "offload", "disk", "streaming", "recovery", "drain", "vllm")
"""Benchmarks of a checkout that run without a GPU (vllm only if its engine does). Those for GPUs are not listed."""
WITH_THREADS = ("obstore", "glide_sync", "mooncake")
"""Libraries of stores with threads of their own. One that asks for Python while Python ends aborts the process."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that are nobody's bug."""
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose options, --help included, another program reads."""

app = typer.Typer(
    help="A KV-cache server for LLM inference engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(admin.app, name="admin")
app.add_typer(remote.app, name="remote")


def main() -> NoReturn:
    leave(run_command(asked_for(sys.argv[1:]), "kvserver"))


def asked_for(arguments: Sequence[str]) -> typer.Typer:
    """The app with the command alone that the first argument names; with all commands if it names none.

    A start waits until the options of all commands are made, of which four have those of the configuration."""
    first = arguments[0] if arguments else ""
    commands = [command for command in app.registered_commands if _name_of(command) == first]
    groups = [group for group in app.registered_groups if group.name == first]
    if not commands and not groups:
        return app
    part = copy.copy(app)
    part.registered_commands, part.registered_groups = commands, groups
    return part


def _name_of(command: CommandInfo) -> str:
    return command.name or get_command_name(command.callback.__name__) if command.callback else ""


def leave(status: int) -> NoReturn:
    """Ends this process, at once if a library of a store is loaded."""
    if any(module in sys.modules for module in WITH_THREADS):
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run_command(command: typer.Typer, name: str) -> int:
    """A command's exit status. An expected error is printed as one line, any other as a traceback and as a bug."""
    status = _run(command, name)
    try:
        sys.stdout.flush()
    except OSError as error:
        _give_output_up(error)
        status = status or 1
    return status


def _run(command: typer.Typer, name: str) -> int:
    try:
        if any("\udc80" <= letter <= "\udcff" for argument in sys.argv for letter in argument):
            raise ConfigError("argument", "the command line has bytes that are not text in UTF-8")
        command(prog_name=name)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KvError as error:
        _complain(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:  # one of two places: a person is waiting and must be told whose fault it is
        if isinstance(error, ImportError) and error.name == "kvserver._native":
            _complain(f"native-module: {error}; `kvserver doctor` says more")
            return 2
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            _give_output_up(error)
            return 1
        traceback.print_exc()
        _complain("this is a bug in kvserver; the lines above belong in its report")
        return 1
    return 0


# ---------------------------------------------------------------- flags from tables


class Flag(NamedTuple):
    """One option whose text is not parsed here, but by the code that defines its meaning."""

    name: str
    metavar: str
    default: str
    text: str
    hidden: bool = False

    @property
    def parameter(self) -> inspect.Parameter:
        flag = "--" + self.name.replace("_", "-")
        default = self.default or '""'
        option = typer.Option(flag, metavar=self.metavar, help=self.text, show_default=default, hidden=self.hidden)
        annotation = Annotated[str | None, option]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flagged(flags: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds these flags to a command, which receives the given texts by name as its first argument.

    typer reads options from a signature, so the wrapper's signature is made from the table: flags are listed once."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {flag.name: values[flag.name] for flag in flags if values[flag.name] is not None}
            command(given, **{option.name: values[option.name] for option in own})

        parameters = [*_parameters(tuple(flags)), *own]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return wrap


@functools.cache
def _parameters(flags: tuple[Flag, ...]) -> list[inspect.Parameter]:
    """Made once for all commands with these flags."""
    return [flag.parameter for flag in flags]


def _config_flag(key: Key) -> Flag:
    metavar = "|".join(key.choices) or ("TEXT" if key.kind is str else "BYTES" if key.in_bytes else "N")
    return Flag(key.name, metavar, key.show(key.default), key.about.text)


CONFIG_FLAGS = (
    Flag("config", "FILE", "none", "TOML file with the keys below, - written as _; flags win over it."),
    *map(_config_flag, KEYS),
    *(Flag(old, "TEXT", "", f"Called {new} now.", hidden=True) for old, new in RENAMED.items()),
)

TRAFFIC_FLAGS = (
    Flag("users", "N", "16", "Sessions at any time."),
    Flag("workers", "N", "2", "Engine-like processes."),
    Flag("in_flight", "N", "3", "Requests that a worker has begun and not ended."),
    Flag("context_tokens_max", "N", "100000", "A session ends at its first longer request."),
    Flag("think_s_max", "SECONDS", "600.0", "Longer pauses are cut to this; all pass on a simulated clock."),
    Flag("block_tokens", "N", "64", "Tokens of a block."),
    Flag("blocks_per_chunk", "N", "4", "Blocks of a chunk."),
    Flag("seed", "N", "42", "Of everything that is drawn."),
)
SIZE_FLAGS = (
    Flag("arena_bytes", "BYTES,...", "eight powers of two", "Arenas to try, with commas between them."),
    Flag("policy", "lru|arc", "lru", "What leaves DRAM first, as the server's eviction_policy."),
    Flag("token_bytes", "BYTES", "128KiB", "KV of a token, of all ranks."),
    Flag("requests", "N", "0", "Requests to send. 0: all of the trace once."),
    Flag("pool_tokens", "N", "262144", "Paged KV of each worker. 0: none, so that the server serves all reuse."),
    *TRAFFIC_FLAGS,
    Flag("migrate_ratio", "RATIO", "0.2", "Chance that a session's next request goes to another worker."),
    Flag("machines", "N", "1", "Servers, each with an arena of that size. Workers are dealt out to them."),
    Flag("remote_write", "none|reuse|through", "none", "Which chunks go to a store that all share. none: no store."),
    Flag("remote_bytes", "BYTES", "0", "Size of that store, which drops what was used longest ago. 0: no end."),
)
"""Named as in sizing/options.py, whose defaults are repeated here because importing it costs as much as a start."""


# ---------------------------------------------------------------- commands


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvserver {kvserver.__version__}")
        raise typer.Exit


@app.callback()
def _kvserver(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A KV-cache server for LLM inference engines."""


@app.command()
@flagged(CONFIG_FLAGS)
def serve(given: dict[str, str]) -> None:
    """Run the server until SIGTERM or SIGINT."""
    if not __debug__:
        raise ConfigError(
            "python-optimized", "python -O removes assertions that keep wrong bytes out; start without it"
        )
    config, origins = _load(given)
    import logging

    from kvserver import logs
    from kvserver.supervisor import supervisor

    logs.start(level=config.log_level, form=config.log_format, process="supervisor")
    for name, origin in origins.items():
        if "rounded" in origin:
            logs.event(logging.INFO, "size rounded", (name, getattr(config, name)), ("origin", origin))
    raise typer.Exit(supervisor.run(config))


@app.command("config")
@flagged(CONFIG_FLAGS)
def config_(
    given: dict[str, str],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Values and origins as one JSON object.")] = False,
    as_example: Annotated[bool, typer.Option("--example", help="A commented file with every key's default.")] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Ask the server at --http-host and --http-port what it has in force.")
    ] = False,
) -> None:
    """Print the configuration that a server begins with, given these flags, or the one that a running server has."""
    if as_example:
        typer.echo(example(), nl=False)
        return
    config, origins = _load(given)
    values = {key.name: getattr(config, key.name) for key in KEYS}
    if running:
        from kvserver.cli.admin_client import in_force

        values, origins = in_force(config)
    if as_json:
        _print_json({key.name: {"value": values[key.name], "origin": origins[key.name]} for key in KEYS})
        return
    lines = [f"{key.name} = {key.toml(values[key.name])}" for key in KEYS]
    width = max(len(line) for line in lines)
    for key, line in zip(KEYS, lines, strict=True):
        typer.echo(f"{line:{width}}  # {origins[key.name]}")


@app.command()
@flagged(CONFIG_FLAGS)
def doctor(
    given: dict[str, str],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as a JSON list.")] = False,
    report: Annotated[
        str, typer.Option("--report", metavar="FILE", help="Write all that a maintainer asks first, without secrets.")
    ] = "",
) -> None:
    """Check that this machine can run a server with these flags; exits with 1 if something is missing."""
    config, origins = _load(given)
    from kvserver.cli.doctor.doctor import examine

    findings = examine(config)
    if as_json:
        _print_json([finding._asdict() for finding in findings])
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.verdict:4}  {finding.check:{width}}  {finding.text}")
    if report:
        from kvserver.cli.doctor.report import text_of, write

        write(Path(report), text_of(config, origins, findings, _ask_status))
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def status(
    *,
    socket: Annotated[str, typer.Option(metavar="PATH", help="The server's socket.", show_default="the default")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The status document as it is.")] = False,
) -> None:
    """Ask a running server what it is doing."""
    import msgspec

    from kvserver.cli.status_text import overview
    from kvserver.wire.status import Status

    document = _ask_status(socket or default_socket())
    if as_json:
        _print_json(document)
    else:
        typer.echo("\n".join(overview(msgspec.convert(document, Status))))


@app.command()
def describe(
    *,
    socket: Annotated[str, typer.Option(metavar="PATH", help="The server's socket.", show_default="the default")] = "",
) -> None:
    """Show what engines have registered with a running server: their caches, and the groups of each."""
    import msgspec

    from kvserver.cli.status_text import described
    from kvserver.wire.status import Status

    document = _ask_status(socket or default_socket())
    typer.echo("\n".join(described(msgspec.convert(document, Status))))


@app.command()
def top(
    *,
    socket: Annotated[str, typer.Option(metavar="PATH", help="The server's socket.", show_default="the default")] = "",
    refresh: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How often to ask.", parser=seconds("refresh", least=0.1, most=3600)),
    ] = 1.0,
    turns: Annotated[
        int,
        typer.Option(metavar="COUNT", help="End after so many; 0: at Ctrl-C.", parser=whole("turns", most=1_000_000)),
    ] = 0,
) -> None:
    """Show what a running server does, over time: a screen on a terminal, else a line each time."""
    import msgspec

    from kvserver.cli.top import top as show
    from kvserver.wire.status import Status

    with _client(socket or default_socket()) as client, suppress(KeyboardInterrupt):

        def ask() -> Status | None:
            try:
                return msgspec.convert(client.status(), Status)
            except ResourceError:
                return None

        show(ask, refresh_s=refresh, turns=turns)


@app.command()
def explain(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY...]", help="Of a prompt from its beginning on, or one key from anywhere; in hexadecimal."
        ),
    ] = None,
    *,
    tokens: Annotated[
        str, typer.Option(metavar="FILE", help="Token ids of a prompt instead of keys; - is standard input.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Its first digits are enough.", show_default="all")
    ] = "",
    socket: Annotated[str, typer.Option(metavar="PATH", help="The server's socket.", show_default="the default")] = "",
) -> None:
    """Ask a running server what a lookup of a prompt would find now, and why no more."""
    from kvserver.cli.explain import explain as explained

    with _client(socket or default_socket()) as client:
        typer.echo("\n".join(explained(client, keys=keys or [], tokens=tokens, namespace=namespace)))


@app.command("disk")
@flagged(CONFIG_FLAGS)
def disk_(
    given: dict[str, str],
    *,
    what: Annotated[
        Literal["inspect", "verify", "drain"],
        typer.Argument(
            help="inspect: what lies there. verify: read it all, while no server uses it. drain: empty a device of a "
            "running server."
        ),
    ],
    device: Annotated[
        str | None, typer.Argument(help="Of drain: the number of the device, or its directory.", show_default=False)
    ] = None,
) -> None:
    """Look at the disk tier (exit 1: a device or record is wrong), or drain a device."""
    config, _ = _load(given)
    from kvserver.cli.progress import shown

    if what == "drain":
        if device is None:
            raise ConfigError("disk-device", "disk drain: name the device, by its number or its directory")
        from kvserver.cli.drain import drain

        with _client(config.socket) as client, shown() as show:
            said = drain(client, device, show)
        typer.echo(said)
        return
    if device is not None:
        raise ConfigError("disk-device", f"disk {what} {device!r}: it looks at all devices of --disk-paths")
    from kvserver.cli.disk import inspect as inspect_disks
    from kvserver.cli.disk import said as said_of
    from kvserver.cli.disk import verify as verify_disks

    if what == "inspect":
        raise typer.Exit(0 if inspect_disks(config, typer.echo) else 1)
    with shown() as show:
        counts = verify_disks(
            config, lambda done, total: show(done, total, f"{done:,} of {total:,} records"), typer.echo
        )
    typer.echo(f"all devices: {said_of(counts)}")
    raise typer.Exit(1 if counts.total() > counts["right"] else 0)


@app.command(context_settings=PASSED_ON)
def replay(context: typer.Context) -> None:
    """Replay recorded traffic with engine-like workers and compare every byte (from a checkout)."""
    if not (CHECKOUT / "benchmarks" / "replay").is_dir():
        text = f"replays are part of a checkout, not of an installation; there is no {CHECKOUT}/benchmarks/replay"
        raise ConfigError("replay", f"{text}. `kvserver size` estimates hit rates anywhere")
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "benchmarks.replay", *context.args]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})  # files are named from where the user is


@app.command()
@flagged(SIZE_FLAGS)
def size(
    given: dict[str, str],
    *,
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="claude-code, mooncake, a trace or a key log.")],
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw hit rate against GB, as an SVG file.", parser=plot_file)
    ] = None,
) -> None:
    """Print what arenas of several sizes would hit: recorded traffic through the server's own decisions, no bytes."""
    from kvserver.cli.progress import shown
    from kvserver.sizing.options import SizingOptions
    from kvserver.sizing.plot import draw
    from kvserver.sizing.report import render
    from kvserver.sizing.run import Progress, run

    words = filter(None, given.pop("arena_bytes", "").split(","))
    sizes = tuple(option_value(SizingOptions, "arena_bytes", word.strip()) for word in words)
    values = {name: option_value(SizingOptions, name, text) for name, text in given.items()}
    with shown() as show:

        def tell(progress: Progress) -> None:
            show(*progress)

        sizing = run(SizingOptions(trace=trace, arena_bytes=sizes, **values), tell)
    if plot is not None:
        plot.write_text(draw(sizing))
    if as_json:
        _print_json(sizing)
    else:
        typer.echo(render(sizing))


@app.command("kvsize")
def kv_size(
    model: Annotated[Path, typer.Argument(metavar="CONFIG", help="A model's config.json, or the folder that has it.")],
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="As --kv-cache-dtype of the engine.")] = "auto",
) -> None:
    """Print how many bytes of KV a model keeps for each token, for --token-bytes and for the arena's size."""
    from kvserver.sizing import model as sizing_model
    from kvserver.units import GIB, show_bytes

    found = sizing_model.kv_size(model, dtype)
    for kind, layers in sorted(found.layers.items()):
        typer.echo(f"{layers} layers, {kind}: {found.formula} ({found.dtype})")
    typer.echo(f"bytes a token: {found.token_bytes} ({show_bytes(found.token_bytes)})")
    if found.window_token_bytes:
        typer.echo(f"more for each token inside the window: {found.window_token_bytes}")
    if found.token_bytes:
        typer.echo(f"an arena of 64GiB holds {64 * GIB // found.token_bytes} tokens")


@app.command()
def bench(
    which: Annotated[str, typer.Argument(metavar=f"[{'|'.join(BENCHES)}]")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]")] = None,
) -> None:
    """Run a benchmark of a checkout; arguments behind -- are its own: kvserver bench vllm -- documents --help."""
    if which not in BENCHES:
        raise ConfigError("bench", f"{which!r} is none of {', '.join(BENCHES)}")
    file = CHECKOUT / "benchmarks" / f"bench_{which}.py"
    if not file.exists():
        raise ConfigError("bench", f"benchmarks are part of a checkout, not of an installation; there is no {file}")
    command = [sys.executable, "-m", f"benchmarks.bench_{which}", *(arguments or [])]
    raise typer.Exit(subprocess.run(command, cwd=CHECKOUT, check=False).returncode)


def _load(given: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    flags = dict(given)
    path = flags.pop("config", None)
    return load(Path(path) if path is not None else None, flags)


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _give_output_up(error: OSError) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
    if not isinstance(error, BrokenPipeError):  # a reader that wants no more, such as `head`, is no trouble
        _complain(f"output: the result was not written whole: {error.strerror}")


def _complain(message: str) -> None:
    print(f"kvserver: {message}", file=sys.stderr)

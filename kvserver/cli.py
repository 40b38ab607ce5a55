"""The `kvserver` command. Results go to standard output, everything else to standard error.

Exit status: 0 done; 1 it was tried and failed; 2 the command or the configuration is wrong. What a command needs is
imported when it runs, so that --help and a start never wait for what they do not use.
"""
# ruff: noqa: PLC0415

import functools
import inspect
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

import kvserver
from kvserver.config import KEYS, Config, Key, default_socket, example, load
from kvserver.errors import ConfigError, KvError

STATUS_S = 5.0
CHECKOUT = Path(kvserver.__file__).resolve().parent.parent
BENCHES = ("service", "host", "start")

app = typer.Typer(
    help="A KV-cache server for LLM inference engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """The command's edge: an error that was foreseen is one line, anything else a traceback and that it is a bug."""
    try:
        app(prog_name="kvserver")
    except KvError as error:
        _complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ImportError as error:
        if error.name != "kvserver._native":
            raise
        _complain(f"native-module: {error}; `kvserver doctor` says more")
        sys.exit(2)
    except Exception:  # one of two places: a person is waiting and must be told whose fault it is
        traceback.print_exc()
        _complain("this is a bug in kvserver; the lines above belong in its report")
        sys.exit(1)
    sys.exit(0)


# ---------------------------------------------------------------- configuration as flags


class Settings(NamedTuple):
    """What a command line said about the configuration."""

    path: Path | None
    flags: dict[str, str]

    def load(self) -> tuple[Config, dict[str, str]]:
        return load(self.path, self.flags)


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command --config and a flag for each key of Config; it receives them as Settings, its first argument.

    typer makes options from a signature, so the wrapper has one that is made from KEYS: no key is written twice."""
    own = list(inspect.signature(command).parameters.values())[1:]
    file = Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file; flags win over it.", show_default=False)
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        flags = {key.name: given[key.name] for key in KEYS if given[key.name] is not None}
        command(Settings(given["config_file"], flags), **{option.name: given[option.name] for option in own})

    parameters = [_parameter("config_file", file), *(_parameter(key.name, _option(key)) for key in KEYS), *own]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(name: str, annotation: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(key: Key) -> object:
    """A flag takes its text as it is; config.py parses it, so a flag and a file are refused in the same words."""
    metavar = "|".join(key.choices) or ("TEXT" if key.kind is str else "BYTES" if key.in_bytes else "N")
    shown = key.show(key.default) or '""'
    return Annotated[str | None, typer.Option(key.flag, metavar=metavar, help=key.about.text, show_default=shown)]


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
@configured
def serve(settings: Settings) -> None:
    """Run the server until SIGTERM or SIGINT."""
    if not __debug__:
        raise ConfigError(
            "python-optimized", "python -O removes assertions that keep wrong bytes out; start without it"
        )
    config, origins = settings.load()
    from kvserver import supervisor

    for name, origin in origins.items():
        if "rounded" in origin:
            _complain(f"{name} is {getattr(config, name)} ({origin})")
    raise typer.Exit(supervisor.run(config))


@app.command("config")
@configured
def config_(
    settings: Settings,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Values and origins as one JSON object.")] = False,
    as_example: Annotated[bool, typer.Option("--example", help="A commented file with every key's default.")] = False,
) -> None:
    """Print the configuration that is in force with these flags, and where each value comes from."""
    if as_example:
        typer.echo(example(), nl=False)
        return
    config, origins = settings.load()
    if as_json:
        _print_json({key.name: {"value": getattr(config, key.name), "origin": origins[key.name]} for key in KEYS})
        return
    lines = [f"{key.name} = {key.toml(getattr(config, key.name))}" for key in KEYS]
    width = max(len(line) for line in lines)
    for key, line in zip(KEYS, lines, strict=True):
        typer.echo(f"{line:{width}}  # {origins[key.name]}")


@app.command()
@configured
def doctor(
    settings: Settings,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as a JSON list.")] = False,
) -> None:
    """Check that this machine can run a server with these flags; exits with 1 if something is missing."""
    config, _ = settings.load()
    from kvserver.doctor import examine

    findings = examine(config)
    if as_json:
        _print_json([finding._asdict() for finding in findings])
    else:
        width = max(len(finding.check) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.verdict:4}  {finding.check:{width}}  {finding.text}")
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

    from kvserver.overview import overview
    from kvserver.wire.status import decode_status

    document = _ask_status(socket or default_socket())
    if as_json:
        typer.echo(msgspec.json.format(document, indent=2).decode())
    else:
        typer.echo("\n".join(overview(decode_status(document))))


@app.command()
def bench(
    which: Annotated[str, typer.Argument(metavar=f"[{'|'.join(BENCHES)}]")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]")] = None,
) -> None:
    """Run a benchmark of a checkout; arguments behind -- are its own, for example: kvserver bench host -- --json."""
    if which not in BENCHES:
        raise ConfigError("bench", f"{which!r} is none of {', '.join(BENCHES)}")
    file = CHECKOUT / "benchmarks" / f"bench_{which}.py"
    if not file.exists():
        raise ConfigError("bench", f"benchmarks are part of a checkout, not of an installation; there is no {file}")
    command = [sys.executable, "-m", f"benchmarks.bench_{which}", *(arguments or [])]
    raise typer.Exit(subprocess.run(command, cwd=CHECKOUT, check=False).returncode)


def _ask_status(socket: str) -> bytes:
    raise NotImplementedError(socket)


def _print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _complain(message: str) -> None:
    print(f"kvserver: {message}", file=sys.stderr)

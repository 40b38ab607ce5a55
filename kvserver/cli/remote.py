"""`kvserver remote VERB`: looks at a store that several servers share, tries it, clears it, and sweeps it.

`status` asks a running server. `probe`, `contract`, `inspect` and `sweep` need none: they ask the store itself.
`clear` does either.
"""
# ruff: noqa: PLC0415

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvserver.cli.admin import URL, TokenFile, Url
from kvserver.cli.server_connection import ask_status
from kvserver.cli.values import key as digest
from kvserver.cli.values import seconds, whole
from kvserver.config.config import Config, load
from kvserver.config.paths import default_socket
from kvserver.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from kvserver.config.remotes import Remote

LIMIT, WITHIN_S = 100_000, 10.0
SWEPT_MAX, SWEPT_WITHIN_S, SWEPT_PER_S = 10_000_000, 3600.0, 1000.0

app = typer.Typer(
    help="Look at the cache that several servers share, try it, and clear it (docs/remote.md).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[str, typer.Option("--config", metavar="FILE", help="The server's TOML file.")]
Remotes = Annotated[
    str, typer.Option("--remotes", metavar="TEXT", help="The store as a flag of the server; wins over the file.")
]
StoreName = Annotated[str, typer.Option("--store", metavar="NAME", help="Which store, where several are named.")]


@app.command()
def status(
    *,
    socket: Annotated[str, typer.Option(metavar="PATH", help="The server's socket.", show_default="the default")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="What the status document has of it, as it is.")] = False,
) -> None:
    """Ask a running server how its store is used: whether it can be, what moved, what failed."""
    import msgspec

    from kvserver.cli.remote_text import counters_of, lines_of
    from kvserver.wire.status import Status

    known = msgspec.convert(ask_status(socket or default_socket()), Status)
    if as_json:
        others = {"other_remotes": known.other_remotes} if known.other_remotes else {}
        shown = {"remote": known.remote, **others, "counters": counters_of(known)}
        typer.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        typer.echo("\n".join(lines_of(known)))


@app.command()
def probe(*, config: ConfigFile = "", remotes: Remotes = "", store: StoreName = "") -> None:
    """Write a chunk to each store, read it and remove it, as doctor does; exits with 1 if that fails."""
    named = _stores(_config(config, remotes), store)
    from kvserver.cli.doctor.doctor import try_store

    failed = False
    for remote in named:
        verdict, text = try_store(remote)
        typer.echo(f"{verdict:4}  {text}")
        failed |= verdict == "fail"
    if failed:
        raise typer.Exit(1)


@app.command()
def contract(*, config: ConfigFile = "", remotes: Remotes = "", store: StoreName = "") -> None:
    """Test whether an object store or a plug-in does what servers need (docs/store-plugins.md); exit 1 if not."""
    from kvserver.movers.remote_store import check, open_driver
    from kvserver.remote.objects.contract import run

    remote = _store(_config(config, remotes), store)
    if not remote.bucket and not remote.plugin:
        raise ConfigError("config-remote", f"{remote.url} is no object store and no plug-in, so there is no contract")
    check(remote)
    problems = 0
    for name, problem in run(lambda: open_driver(remote)):
        typer.echo(f"{'FAIL' if problem else 'ok':4}  {name}{': ' if problem else ''}{problem}")
        problems += bool(problem)
    if problems:
        raise typer.Exit(1)


@app.command()
def inspect(
    *,
    config: ConfigFile = "",
    remotes: Remotes = "",
    store: StoreName = "",
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Count what this one has. Its first digits are enough.")
    ] = "",
    key: Annotated[str, typer.Option(metavar="HEX", help="With --namespace: show this chunk, and compare it.")] = "",
    limit: Annotated[
        int, typer.Option(metavar="N", help="List so many names at most.", parser=whole("limit", most=1_000_000_000))
    ] = LIMIT,
    within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="List for so long at most.", parser=seconds("within", least=0.1, most=86_400)
        ),
    ] = WITHIN_S,
) -> None:
    """List the namespaces of the store, or what one of them has, and change nothing. Exit 1: a chunk is not there, or
    is wrong."""
    if key and not namespace:
        raise ConfigError("key-text", "inspect --key: name the namespace as well, with --namespace")
    remote = _store(_config(config, remotes), store)
    from kvserver.cli import remote_look

    with remote_look.opened(remote) as opened:
        look = remote_look.Look(opened, remote, remote_look.Bounds(limit, within), typer.echo)
        if not namespace:
            look.namespaces()
        elif not key:
            look.namespace(namespace)
        elif not look.chunk(namespace, digest(key)):
            raise typer.Exit(1)


@app.command()
def clear(
    namespace: Annotated[
        str, typer.Argument(metavar="[NAMESPACE]", help="64 hexadecimal digits; inspect prints them.")
    ] = "",
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="All namespaces of the tenant that have a note in the store.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigFile = "",
    remotes: Remotes = "",
    store: StoreName = "",
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Forget a namespace. Without --config and --remotes a running server does it, as `kvserver admin clear`. With one
    of them only the stores are told, and their servers hear of it from there."""
    if bool(namespace) == everything:
        raise ConfigError("option", "name a namespace, or --all, and not both")
    of = [] if everything else [digest(namespace)]
    if not config and not remotes:
        if everything or store:
            raise ConfigError("option", "--all and --store ask the store itself: expected --config or --remotes")
        _confirm("Forget this namespace, on this server and in its store?", yes=yes)
        _clear_by_server(namespace, url, token_file)
        return
    named = _stores(_config(config, remotes), store)
    names = ", ".join(remote.name for remote in named)
    _confirm(f"Forget {'all namespaces' if everything else 'this namespace'} in {names}?", yes=yes)
    from kvserver.cli import remote_look
    from kvserver.remote.epoch_lease import LEASE_S

    problems: list[str] = []
    for remote in named:
        where = f"in {remote.name}: " if len(named) > 1 else ""
        try:
            with remote_look.opened(remote) as opened:
                count = remote_look.clear(opened, remote, of or remote_look.all_namespaces(opened, remote))
        except (ConfigError, DeviceError) as problem:
            if len(named) == 1:
                raise
            problems.append(problem.code)
            typer.echo(f"{where}not cleared: {problem.message}")
            continue
        said = f"{count:,} namespaces; within {LEASE_S:g} s no server finds what the store had of them"
        typer.echo(f"{where}cleared: {said}")
    if len(problems) == len(named) or set(problems) - {"remote-namespace"}:
        raise typer.Exit(1)


@app.command()
def sweep(
    *,
    config: ConfigFile = "",
    remotes: Remotes = "",
    store: StoreName = "",
    older_than: Annotated[
        float,
        typer.Option(
            metavar="DAYS",
            help="Also what was not used for so long; of an object store, what was written so long ago. 0: no.",
            parser=seconds("older-than", least=0, most=36_500, unit="days"),
        ),
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    limit: Annotated[
        int, typer.Option(metavar="N", help="Remove so many names at most.", parser=whole("limit", most=1_000_000_000))
    ] = SWEPT_MAX,
    within: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Go on for so long.", parser=seconds("within", least=0.1, most=86_400)),
    ] = SWEPT_WITHIN_S,
    per_second: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Remove so many names a second.",
            parser=seconds("per-second", least=1, most=100_000, unit="names"),
        ),
    ] = SWEPT_PER_S,
) -> None:
    """Remove what was cleared, chunks of epochs that no server finds any more, and old ones. Servers may go on."""
    remote = _store(_config(config, remotes), store)
    if not dry_run:
        _confirm(f"Remove {'old chunks' if older_than else 'what was cleared'} in {remote.name}?", yes=yes)
    from kvserver.cli import remote_look

    with remote_look.opened(remote) as opened:
        swept = remote_look.sweep(
            opened,
            remote,
            remote_look.all_namespaces(opened, remote),
            bounds=remote_look.Bounds(limit, within),
            values_per_s=per_second,
            only_looks=dry_run,
            unused_since_s=time.time() - older_than * 86_400 if older_than else None,
        )
    ended = f"ended {swept.ended}; " if swept.ended else ""
    typer.echo(f"{ended}{'found' if dry_run else 'removed'} of {len(swept.content.epochs):,} epochs: {swept.content}")


def _clear_by_server(namespace: str, url: str, token_file: str) -> None:
    from kvserver.cli.admin_client import AdminClient, read_token

    said = AdminClient(url, read_token(token_file)).command("clear", {"namespace": namespace, "key": ""})
    typer.echo(f"cleared: {said['chunks']:,} chunks")


def _confirm(question: str, *, yes: bool) -> None:
    """Asks, unless that was answered by --yes. Raises ConfigError where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("option", "standard input is no terminal, so nobody can be asked: expected --yes")
    typer.confirm(question, abort=True)


def _config(config: str, remotes: str) -> Config:
    return load(Path(config) if config else None, {"remotes": remotes} if remotes else {})[0]


def _stores(config: Config, name: str) -> "tuple[Remote, ...]":
    """The stores of the configuration, or the one with that name. Raises ConfigError if there is none."""
    named = config.remote_stores
    if not named:
        raise ConfigError("config-remote", "no store is named: expected --remotes, or [remotes.NAME] in --config")
    found = tuple(remote for remote in named if name in ("", remote.name))
    if not found:
        names = ", ".join(remote.name for remote in named)
        raise ConfigError("config-remote", f"--store {name!r} is not among the stores: expected one of {names}")
    return found


def _store(config: Config, name: str) -> "Remote":
    """The same for what can be asked of one store alone."""
    found = _stores(config, name)
    if len(found) > 1:
        names = ", ".join(remote.name for remote in found)
        raise ConfigError("config-remote", f"several stores are named: expected --store with one of {names}")
    return found[0]

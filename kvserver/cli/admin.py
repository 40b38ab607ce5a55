"""`kvserver admin VERB`: commands a running server. The token comes from admin_client.read_token()."""
# ruff: noqa: PLC0415

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvserver.cli.values import seconds, whole
from kvserver.config.config import load
from kvserver.errors import ConfigError
from kvserver.wire.admin import QUIET_MS_MAX, TTL_MS_MAX, LogLevel

if TYPE_CHECKING:
    from kvserver.cli.admin_client import AdminClient

app = typer.Typer(
    help="Command a running server; it must have an admin token (docs/admin.md).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Where the server's HTTP port is, on this machine.")]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file", metavar="FILE", help="File with your token.", show_default="the token in $KVSERVER_ADMIN_TOKEN"
    ),
]
Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="64 hexadecimal digits; explain prints them.")]
Keys = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY...]", help="Of a prompt from its beginning on, or one key; in hexadecimal."),
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="FILE", help="Token ids of a prompt instead of keys; - is standard input.")
]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens",
        metavar="N",
        help="With --tokens: tokens of a chunk.",
        parser=whole("chunk_tokens", most=1 << 20),
    ),
]
URL = "http://127.0.0.1:9710"


@app.command()
def clear(
    namespace: Namespace,
    *,
    key: Annotated[str, typer.Option(metavar="KEY", help="Only this chunk and what continues it.")] = "",
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Forget a namespace, or a prefix, durably: nothing of it is served again."""
    said = _client(url, token_file).command("clear", {"namespace": namespace, "key": key})
    typer.echo(f"cleared: {said['chunks']:,} chunks")


@app.command("clear-tenant")
def clear_tenant(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="As its caches are registered.")],
    *,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Forget all namespaces of a tenant, durably: nothing of them is served again."""
    said = _client(url, token_file).command("clear-tenant", {"tenant": tenant})
    typer.echo(f"cleared: {said['chunks']:,} chunks in {said['namespaces']:,} namespaces")


@app.command("new-weights")
def new_weights(
    namespace: Namespace,
    *,
    quiet_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Store nothing there for so long, while old KV is on its way.",
            parser=seconds("quiet_s", least=0, most=QUIET_MS_MAX / 1000),
        ),
    ] = 60.0,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """The weights behind a namespace have changed: forget what it holds, and what is on its way there."""
    fields = {"namespace": namespace, "quiet_ms": round(quiet_s * 1000)}
    said = _client(url, token_file).command("new-weights", fields)
    typer.echo(f"cleared: {said['chunks']:,} chunks; nothing is stored there for {quiet_s:g} s")


@app.command()
def pin(
    namespace: Namespace,
    keys: Keys = None,
    *,
    for_s: Annotated[
        float,
        typer.Option(
            "--for", metavar="SECONDS", help="How long.", parser=seconds("for", least=0.001, most=TTL_MS_MAX / 1000)
        ),
    ] = 3600.0,
    tokens: Tokens = "",
    chunk_tokens: ChunkTokens = 0,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Keep a prefix in DRAM for a time."""
    fields = {"namespace": namespace, "keys": _keys(keys, tokens, chunk_tokens), "ttl_ms": round(for_s * 1000)}
    said = _client(url, token_file).command("pin", fields)
    typer.echo(f"hold {said['hold']}: {_held(said)} for {for_s:g} s")


@app.command()
def unpin(
    hold: Annotated[
        int,
        typer.Argument(
            metavar="HOLD", help="As pin has said, or status --json.", parser=whole("hold", most=(1 << 63) - 1)
        ),
    ],
    *,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """End a pin before its time."""
    _client(url, token_file).command("unpin", {"hold": hold})
    typer.echo(f"hold {hold} is over")


@app.command()
def warm(
    namespace: Namespace,
    keys: Keys = None,
    *,
    tokens: Tokens = "",
    chunk_tokens: ChunkTokens = 0,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Bring a prefix from disk to DRAM."""
    fields = {"namespace": namespace, "keys": _keys(keys, tokens, chunk_tokens)}
    typer.echo(_held(_client(url, token_file).command("warm", fields)))


@app.command()
def drain(
    *,
    wait: Annotated[bool, typer.Option(help="Come back when the server may be stopped.")] = True,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Take no more stores and write to disk what DRAM alone holds, so that the server can be stopped. Exit 1: the disks
    did not take all of it."""
    from kvserver.cli.admin_client import left_in_words, wait_drained

    client = _client(url, token_file)
    client.command("drain", {})
    if wait:
        left = wait_drained(client, lambda line: typer.echo(line, err=True))
        if not left:
            typer.echo("drained: the server may be stopped; nothing is in DRAM alone")
            return
        typer.echo(f"drained, and this is still in DRAM alone: {left_in_words(left)}")
        if "no-disk" not in left:  # there a drain has nothing to write
            raise typer.Exit(1)


@app.command()
def resume(*, url: Url = URL, token_file: TokenFile = "") -> None:
    """Take stores again after a drain."""
    _client(url, token_file).command("resume", {})
    typer.echo("stores are taken again")


@app.command("log-level")
def log_level(
    level: Annotated[LogLevel, typer.Argument(metavar="debug|info|warning|error")],
    *,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Change the least level that the brain logs, until it ends."""
    _client(url, token_file).command("log-level", {"level": level})
    typer.echo(f"log_level = {level}")


@app.command()
def reload(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The server's TOML file.")],
    *,
    url: Url = URL,
    token_file: TokenFile = "",
) -> None:
    """Have the server read its tokens again, and take over from a file the keys that can change while it runs."""
    import msgspec

    values = msgspec.to_builtins(load(config, {})[0])
    said = _client(url, token_file).command("reload", {"values": values})
    typer.echo(f"changed: {', '.join(said['keys']) or 'nothing'}")
    if said["needs_restart"]:
        typer.echo(f"other than in force, and only at the next start: {', '.join(said['needs_restart'])}")


def _client(url: str, token_file: str) -> "AdminClient":
    from kvserver.cli.admin_client import AdminClient, read_token

    return AdminClient(url, read_token(token_file))


def _keys(keys: list[str] | None, tokens: str, chunk_tokens: int) -> list[str]:
    if bool(keys) == bool(tokens) or bool(tokens) != (chunk_tokens > 0):
        raise ConfigError("keys", "name keys, or a file of token ids with --tokens and --chunk-tokens, and not both")
    if keys:
        return keys
    from kvclient.keys import chunk_keys
    from kvserver.cli import values
    from kvserver.wire.messages import KEY_BYTES

    packed = chunk_keys(values.tokens(tokens), chunk_tokens)
    return [packed[at : at + KEY_BYTES].hex() for at in range(0, len(packed), KEY_BYTES)]


def _held(said: dict[str, Any]) -> str:
    away = f", {said['chunks_on_disk']:,} of them on their way from disk" if said["chunks_on_disk"] else ""
    return f"{said['chunks']:,} chunks{away}"

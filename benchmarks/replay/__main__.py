"""The command line of a replay: `kvserver replay`, which runs this file of a checkout."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.replay.options import Arm, ReplayOptions
from benchmarks.replay.plot import draw
from benchmarks.replay.progress import Progress
from benchmarks.replay.report import progress_line, render, render_json
from benchmarks.replay.run import run
from kvserver.cli import main
from kvserver.cli.progress import shown
from kvserver.cli.values import option_value, plot_file
from kvserver.errors import ConfigError

FLAGS = (
    main.Flag("trace", "NAME|FILE", "claude-code", "Recorded traffic: claude-code, mooncake, or a file."),
    main.Flag("requests", "N", "1500", "Requests to send. 0: all of the trace once."),
    *main.TRAFFIC_FLAGS,
    main.Flag("pool_tokens", "N", "262144", "Paged KV of each worker."),
    main.Flag("regions", "N", "8", "Layers x K/V."),
    main.Flag("page_bytes", "BYTES", "8KiB", "Bytes of one block in one region."),
    main.Flag("arena_bytes", "BYTES", "384MiB", "Arena of the servers that are started."),
    main.Flag("disk_dir", "PATH", "/var/tmp", "Where disk tiers of arms with --disk-bytes lie; removed at the end."),
    main.Flag("restart_after", "N", "0", "Kill the server after so many requests, and start it again. 0: never."),
    main.Flag("prefill_times", "RATIO", "8.75", "Time to prefill, over that of Llama-3.1-8B on an H200."),
    main.Flag("model_token_bytes", "BYTES", "160KiB", "KV of a token of the modelled model."),
    main.Flag("model_disk_bytes_per_s", "RATE", "0.0", "Rate of the modelled disks. 0: as measured in the run."),
    main.Flag("socket", "PATH", "start one", "Use the server at this socket."),
    main.Flag("name", "WORD", "replay", "First word of the last line."),
)
"""Named as in options.py."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
@main.flagged(FLAGS)
def replay(
    given: dict[str, str],
    *,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME: FLAGS'", help="A server to compare, with its own serve flags; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw hit rates and times to first token, as an SVG file.", parser=plot_file),
    ] = None,
) -> None:
    """Replay recorded traffic with engine-like workers and compare every byte; exits with 1 if one is wrong."""
    values = {name: option_value(ReplayOptions, name, text) for name, text in given.items()}
    if arm:
        values["arms"] = tuple(map(_arm, arm))
    elif "socket" in given:
        values["arms"] = (Arm("with kvserver"),)
    options = ReplayOptions(**values)
    with shown() as show:

        def tell(progress: Progress) -> None:
            show(progress.requests_ended, progress.requests, progress_line(progress))

        result = run(options, tell)
    if plot is not None:
        plot.write_text(draw(result))
    typer.echo(render_json(result) if as_json else render(result))
    raise typer.Exit(result.exit_code)


def _arm(text: str) -> Arm:
    name, _, flags = text.partition(":")
    try:
        return Arm(name.strip(), tuple(shlex.split(flags)))
    except ValueError:
        raise ConfigError("option", f"arm={text!r} has a quotation mark without its second") from None


if __name__ == "__main__":
    main.leave(main.run_command(app, "kvserver replay"))

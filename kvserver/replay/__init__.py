"""`kvserver replay`: recorded traffic against a real server, with every byte that comes back compared.

`run(ReplayOptions(...), progress)` does it, `render(result)` says what came of it.
"""

from kvserver.replay.options import Arm, ReplayOptions
from kvserver.replay.progress import Progress
from kvserver.replay.report import progress_line, render, render_json
from kvserver.replay.result import ReplayResult
from kvserver.replay.run import run

__all__ = ["Arm", "Progress", "ReplayOptions", "ReplayResult", "progress_line", "render", "render_json", "run"]

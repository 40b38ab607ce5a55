"""`kvserver serve` with test processes in place of its own. Everything else is the product's own code."""

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from kvserver.cli import main
from kvserver.supervisor import supervisor


def serve(modules: Mapping[str, str]) -> None:
    """Runs this process's command line.

    `modules` maps modules that the supervisor would start to their replacements."""
    spawn: Callable[..., Any] = supervisor.Supervisor._spawn

    def spawn_stand_in(self: supervisor.Supervisor, module: str, *rest: object) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = spawn(self, modules.get(module, module), *rest)
        return child

    supervisor.Supervisor._spawn = spawn_stand_in  # type: ignore[assignment,method-assign]
    main.main()

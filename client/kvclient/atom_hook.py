"""An import hook that registers "kvserver" in every process of an unmodified ATOM server.

    python -m kvclient.atom_hook install       once; writes kvserver_atom.pth beside the installed packages
    KVSERVER_ATOM=1 python -m atom.entrypoints.openai_server …
    python -m kvclient.atom_hook remove

Python runs the .pth file at every start. Without KVSERVER_ATOM this costs one look at the environment. With it, arm()
waits until ATOM's factory is imported and registers with it. Spawned processes inherit both.
"""

import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "kvserver"
MODULE = "kvclient.atom"
FACTORY = "atom.kv_transfer.disaggregation.factory"
PTH = "kvserver_atom.pth"
LINE = "import os; os.environ.get('KVSERVER_ATOM') and __import__('kvclient.atom_hook', fromlist=['arm']).arm()\n"


class _Waiting(MetaPathFinder):
    """Import finder that waits for ATOM's factory and then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FACTORY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """The module's own loader, followed by register()."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        register(module.KVConnectorFactory)


def register(factory: Any) -> None:
    """Register the connector. factory: ATOM's KVConnectorFactory. Idempotent."""
    factory.register(
        NAME,
        worker_module=MODULE,
        worker_class="KvServerConnector",
        scheduler_module=MODULE,
        scheduler_class="KvServerScheduler",
        # True would make ATOM use HBM to stage transfers to another node, for DeepSeek-V4.
        requires_pd_staging=False,
    )


def arm() -> None:
    """Register now, or when ATOM's factory is imported."""
    factory = sys.modules.get(FACTORY)
    if factory is not None:
        register(factory.KVConnectorFactory)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def install(folder: Path) -> Path:
    """Write the .pth file into the environment's package folder, or another folder that Python searches for
    .pth files."""
    path = folder / PTH
    path.write_text(LINE)
    return path


def remove(folder: Path) -> bool:
    """Remove the .pth file. False if it was not there."""
    path = folder / PTH
    found = path.is_file()
    path.unlink(missing_ok=True)
    return found


def main(arguments: Sequence[str]) -> int:
    folder = Path(sysconfig.get_paths()["purelib"])
    match list(arguments):
        case ["install"]:
            sys.stdout.write(f"{install(folder)}\nset KVSERVER_ATOM=1 where ATOM is started\n")
        case ["remove"]:
            sys.stdout.write(f"{'removed' if remove(folder) else 'was not there'}: {folder / PTH}\n")
        case _:
            sys.stderr.write("usage: python -m kvclient.atom_hook install | remove\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

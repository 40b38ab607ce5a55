"""The connector is known in every process of an unmodified ATOM."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.atom.connector import SCHEDULER, WORKER
from kvclient.atom_hook import PTH, install, remove
from kvclient.identity.processes import life_of
from tests.atom_engine.conftest import ATOM_DIR

ROOT = Path(__file__).resolve().parents[2]
KNOWN = [f"{generation} kvserver" for generation in range(3)]


def said(*arguments: str, first: Path | None = None, **environment: str) -> list[str]:
    """The output of a process tree, in order of generation."""
    atom = ATOM_DIR or str(Path(__file__).with_name("standin"))
    paths = [*([str(first)] if first else []), atom, str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout.splitlines()


def test_without_either_way_it_is_unknown() -> None:
    lines = said("-m", "tests.atom_engine.process_tree")
    assert len(lines) == 3
    assert all("unknown KV connector" in line for line in lines)


@pytest.mark.skipif(bool(ATOM_DIR), reason="ATOM's server needs a GPU to be imported")
def test_a_wrapper_makes_it_known_in_all_processes() -> None:
    assert said("-m", "kvclient.atom_serve") == KNOWN


def test_a_hook_makes_it_known_in_all_processes(tmp_path: Path) -> None:
    """Python reads the .pth file at every start; here from a folder declared as a site directory."""
    packages = tmp_path / "packages"
    packages.mkdir()
    assert install(packages) == packages / PTH
    others = importlib.util.find_spec("sitecustomize")  # the sitecustomize of the process that runs these tests
    also = f"exec(open({others.origin!r}).read())\n" if others is not None else ""
    (tmp_path / "sitecustomize.py").write_text(f"{also}import site; site.addsitedir({str(packages)!r})\n")
    tree = ("-m", "tests.atom_engine.process_tree")
    assert said(*tree, first=tmp_path, KVSERVER_ATOM="1") == KNOWN
    assert all("unknown KV connector" in line for line in said(*tree, first=tmp_path)), "it has to be asked for"
    assert remove(packages)
    assert not remove(packages)
    assert all("unknown KV connector" in line for line in said(*tree, first=tmp_path, KVSERVER_ATOM="1"))


def test_processes_of_one_engine_name_the_same_life() -> None:
    """A worker is a child of the scheduler's process; a child of another process belongs to another engine.
    ATOM: engine_id_pairs_scheduler_and_workers_of_one_replica.
    """
    code = f"from kvclient.identity.processes import life_of; print(life_of({WORKER}, name='a'))"
    assert said("-c", code) == [str(life_of(SCHEDULER, name="a"))]
    assert said("-c", code) != [str(life_of(SCHEDULER, name="b"))]
    between = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {code!r}], text=True))"
    assert said("-c", between)[0] != str(life_of(SCHEDULER, name="a"))
    deeper = between.replace(f"life_of({WORKER}", f"life_of({WORKER + 1}")
    assert said("-c", deeper)[0] == str(life_of(SCHEDULER, name="a")), "a pipeline stage has a process in between"

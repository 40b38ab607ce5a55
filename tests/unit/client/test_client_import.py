"""`import kvclient` in an incomplete environment: the engine's process gets a message that says what to install."""

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in sys.argv[1].split():
            raise {error}

sys.meta_path.insert(0, Absent())
try:
    import kvclient
except ImportError as error:
    from kvserver.errors import ConfigError, NativeModuleError
    assert type(error) is NativeModuleError, repr(error)
    assert isinstance(error, ConfigError)
    assert error.__cause__ is not None
    print(error.code, error)
else:
    print("imported")
"""
MISSING = 'ModuleNotFoundError(f"No module named {name!r}", name=name)'
ANOTHER_MACHINE = 'ImportError(f"{name}: wrong ELF class: ELFCLASS32", name=name)'


def import_without(names: str, error: str = MISSING) -> str:
    code = WITHOUT.replace("{error}", error)
    done = subprocess.run([sys.executable, "-c", code, names], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("error", [MISSING, ANOTHER_MACHINE])
def test_without_the_native_module_one_typed_error_names_what_to_install(error: str) -> None:
    said = import_without("kvserver._native", error)
    assert said.startswith("native-module native-module: ")
    for text in ("kvserver._native", "install kvserver again", "pip install", "kvserver doctor"):
        assert text in said


def test_no_framework_is_needed() -> None:
    assert import_without("torch numpy vllm cuda hip") == "imported\n"


def test_the_package_itself_needs_nothing_native() -> None:
    """kvserver can be imported and shows its version where nothing else of it can be loaded."""
    code = WITHOUT.replace("{error}", MISSING).replace("import kvclient", "import kvserver; kvserver.__version__")
    absent = "kvserver._native torch zmq msgspec"
    done = subprocess.run([sys.executable, "-c", code, absent], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "imported\n"

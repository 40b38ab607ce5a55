#!/usr/bin/env bash
# Installs a wheel in an environment of its own, without a compiler, and tries it: doctor, serve, a client.
#
#   tests/installed.sh dist/kvserver-*.whl
#
# PYTHON names the interpreter (default python3). The last line says what ran.
set -euo pipefail
wheel=$(realpath "$1")
examples=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../examples")
work=$(mktemp -d)
server=
trap '[[ ! $server ]] || kill "$server" 2> /dev/null || true; rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
# The checkout is not in sight, or its modules would be imported instead of the wheel's.
cd "$work"
for tool in cc gcc g++ c++ clang clang++ cmake ninja make; do
    if (PATH="$work/venv/bin"; command -v "$tool"); then
        echo "$0: the environment has a compiler" >&2
        exit 1
    fi
done
alone=(env -u CC -u CXX -u PYTHONPATH "PATH=$work/venv/bin")

"${alone[@]}" pip install --quiet --disable-pip-version-check --only-binary :all: "$wheel"
"${alone[@]}" python - "$wheel" "$work" << 'END'
import sys, zipfile
from importlib.metadata import version
from pathlib import Path

import kvclient, kvserver, kvserver._native

wheel, work = map(Path, sys.argv[1:])
released = wheel.name.split("-")[1]
assert kvserver.__version__ == version("kvserver") == released, (kvserver.__version__, version("kvserver"), released)
for module in (kvclient, kvserver, kvserver._native):
    assert Path(module.__file__).is_relative_to(work), module.__file__
contained = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
assert contained == {"kvclient", "kvserver", f"kvserver-{released}.dist-info"}, contained
END

mkdir -m 700 run
serving=(--socket "$work/run/kv.sock" --cache-dir "$work/run" --http-port 0 --arena-bytes 64MiB)
"${alone[@]}" kvserver doctor "${serving[@]}"
"${alone[@]}" kvserver serve "${serving[@]}" 2> log &
server=$!
if ! said=$("${alone[@]}" python "$examples/client/roundtrip.py" --socket "$work/run/kv.sock"); then
    cat log >&2
    exit 1
fi
"${alone[@]}" kvserver status --socket "$work/run/kv.sock" > status
kill "$server"
if ! wait "$server" || grep Traceback log; then
    cat log >&2
    exit 1
fi
server=
head -n 1 status
echo "installed wheel: $(basename "$wheel"), no compiler: doctor, serve and a client passed. $said"

#!/bin/sh
# Builds the data plane with sanitizers into build/sanitized-* and runs its tests against that build.
#
#   tests/asan.sh                    address and undefined-behaviour sanitizers
#   tests/asan.sh thread [pytest …]  thread sanitizer
#
# PYTHON names the interpreter of an environment that has the project and its build requirements (default .venv).
set -eu
cd "$(dirname "$0")/.."
sanitizers=${1:-address,undefined}
[ $# -gt 0 ] && shift
python=${PYTHON:-.venv/bin/python}
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
build=build/sanitized-$(echo "$sanitizers" | tr , -)

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKV_SANITIZE="$sanitizers" \
    -DPython_EXECUTABLE="$(command -v python)" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
cmake --build "$build" -j2

# The interpreter is not instrumented, so the runtime has to be in the process before it; and libstdc++ with it, or the
# runtime does not find the function that throws.
case $sanitizers in
    thread) runtime=libtsan.so ;;
    *) runtime=libasan.so ;;
esac
LD_PRELOAD="$(${CXX:-g++} -print-file-name=$runtime) $(${CXX:-g++} -print-file-name=libstdc++.so)"
export LD_PRELOAD
# The interpreter never frees everything; SIGBUS belongs to the data plane's own guard.
export ASAN_OPTIONS=detect_leaks=0:handle_sigbus=0
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=handle_sigbus=0:halt_on_error=1

module=$(ls "$PWD/$build"/_native*.so)
case " $* " in *" tests/"*) ;; *) set -- "$@" tests/unit/native ;; esac  # unless named
exec python -c '
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kvserver._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["kvserver._native"] = module
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--capture=sys", "-o", "timeout=600", *sys.argv[2:]]))
' "$module" "$@"

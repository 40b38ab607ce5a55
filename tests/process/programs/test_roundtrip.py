"""examples/client/roundtrip.py, the program that shows whether an installation works."""

import subprocess
import sys
from pathlib import Path

from kvserver import __version__
from tests.process.harness import WAIT_S, Server

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "client" / "roundtrip.py"


def run(program: Path, socket: Path, wait_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(program), "--socket", str(socket), "--wait-s", str(wait_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)


def test_it_says_which_server_returned_what_was_stored(server: Server) -> None:
    for _ in range(2):
        done = run(PROGRAM, server.path, WAIT_S)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"kvserver {__version__}: 7 chunks, ")
    assert server.status().chunks == 0, "it takes its chunks away again"


def test_it_notices_a_page_with_other_bytes(server: Server, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    text = PROGRAM.read_text()
    assert text.count("    client.close()\n") == 1
    wrong.write_text(text.replace("    client.close()\n", "    os.pwrite(pool, b'other', offset(3, BLOCKS - 2))\n"))
    done = run(wrong, server.path, WAIT_S)
    assert done.returncode == 1
    assert f"block {2 * 3 * 7 - 2} has other bytes in region 3 than block {3 * 7 - 2}" in done.stderr


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path / "nobody.sock", 0.1)
    assert done.returncode == 1
    assert "no server takes the cache: nothing listens there" in done.stderr

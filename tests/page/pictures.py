"""Takes the pictures of the status page for the documents: python -m tests.page.pictures FOLDER

Runs a server with a disk tier, the recorded traffic of `make demo`, and a browser that shows the page for LOOK_S.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.page.browser import Browser
from tests.process.harness import Server, free_port

LOOK_S = 42.0
WIDTH = 1180


def take(folder: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kv-disk-", dir="/var/tmp") as disk:
        server = Server(
            http_port=port, arena_bytes="384MiB", disk_paths=disk, disk_bytes="3GiB", recompute_tokens_per_s=0
        )
        with server, Browser() as browser:
            command = [sys.executable, "-m", "kvserver", "replay", f"--socket={server.path}", "--name=pictures"]
            replay = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                browser.open(f"http://127.0.0.1:{port}/")
                browser.resize(WIDTH, 900)
                time.sleep(LOOK_S)
                for scheme in ("light", "dark"):
                    browser.prefer(scheme)
                    height = browser.run("return document.querySelector('#h-disks').closest('section').offsetTop")
                    browser.resize(WIDTH, int(height))
                    (folder / f"status-{scheme}.png").write_bytes(browser.picture())
            finally:
                replay.terminate()
                replay.wait()


if __name__ == "__main__":
    take(Path(sys.argv[1]))

"""The harness reports the state of processes correctly; other tests rely on it."""

import subprocess
import sys

from tests.process.harness import is_gone

LOOKS = 3000
CHURN = """
import threading
print(flush=True)
while True:
    threads = [threading.Thread(target=int) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_a_process_is_not_gone_while_its_threads_come_and_go() -> None:
    with subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert not any(is_gone(process.pid) for _ in range(LOOKS))
        finally:
            process.kill()
        process.wait()
        assert is_gone(process.pid)

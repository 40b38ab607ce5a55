"""A brain that outlives its supervisor for a moment ends in order and does not log this as a bug.

The kernel kills the brain when the supervisor dies, but closes the supervisor's socket before that. So here the test
plays the supervisor."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvserver.config.config import Config
from kvserver.ipc.fd_sockets import pair
from kvserver.ipc.inheritance import Inheritance
from kvserver.transfer.native import Ledger, create_memfd
from kvserver.wire.orders import Alive, Wish, decode_wish
from tests.process.harness import WAIT_S


@pytest.mark.parametrize("wishes_read", [True, False])
def test_a_brain_without_a_supervisor_ends_whether_or_not_its_wishes_were_read(
    tmp_path: Path, wishes_read: bool
) -> None:
    """With unread messages in it the socket is reset, not closed."""
    config = Config(socket=str(tmp_path / "kv.sock"), arena_bytes=1 << 20, slab_bytes=1 << 20, http_port=0)
    ours, theirs = pair()
    ledger = create_memfd("ledger", Ledger.file_bytes(config.ledger_span_bytes))
    inheritance = Inheritance(parent=os.getpid(), control=theirs.fileno(), ledger=ledger, config=config)
    command = [sys.executable, "-m", "kvserver.brain.process", msgspec.json.encode(inheritance).decode()]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(), ledger), stderr=subprocess.PIPE, text=True) as brain:
        theirs.close()
        os.close(ledger)
        try:
            log = orphaned(brain, ours, wishes_read=wishes_read)
        finally:
            brain.kill()
    assert "brain stops" in log
    assert "Traceback" not in log
    assert brain.returncode == 0


def orphaned(brain: subprocess.Popen[str], supervisor: socket.socket, *, wishes_read: bool) -> str:
    """The brain's log from the loss of its supervisor to its end."""
    supervisor.settimeout(WAIT_S)
    wish: Wish | Alive = decode_wish(supervisor.recv(1 << 16))
    assert wish == Alive()
    if not wishes_read:
        supervisor.recv(1 << 16, socket.MSG_PEEK)  # another message is there
    supervisor.close()
    return brain.communicate(timeout=WAIT_S)[1]

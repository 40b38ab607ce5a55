"""The HTTP client of `kvserver admin`. The token goes to the server and nowhere else."""

import http.client
import ipaddress
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvserver.cli.values import file_text
from kvserver.config.admin_tokens import ENVIRONMENT
from kvserver.config.config import KEYS, Config
from kvserver.errors import FAMILIES, ConfigError, KvError, RequestError, ResourceError

ANSWER_S = 40.0
"""Longer than the server takes for any command (brain/http/admin.py, COMMAND_S)."""
EVERYWHERE = ("0.0.0.0", "::", "*")
POLL_S = 0.5
STALE_POLLS = 4
"""Number of status documents that may be older than the command."""


class AdminClient:
    """A client of one server. Raises KvError when the server refuses a command, or when there is none."""

    def __init__(self, url: str, token: str) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:  # a port that is none, or half an IPv6 address
            parts, self._host = None, ""
        if parts is None or parts.scheme != "http" or not self._host:
            raise ConfigError("url", f"{url!r} must be http://HOST:PORT")
        if not _is_here(self._host):
            raise ConfigError(
                "url", f"{url!r} is not on this machine; a server takes commands from its own, and no token travels"
            )
        self._token = token

    def command(self, verb: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """The server's reply after the command is carried out."""
        body = msgspec.json.encode(fields)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        status, document = self._ask("POST", f"/admin/{verb}", body, headers)
        if status != http.client.OK:
            family = {http.client.SERVICE_UNAVAILABLE: "resource", http.client.BAD_GATEWAY: "device"}.get(status)
            error: type[KvError] = FAMILIES[family] if family else RequestError
            raise error(str(document.get("code", status)), str(document.get("error", "")))
        return document

    def get(self, path: str) -> dict[str, Any]:
        """One of the server's documents."""
        status, document = self._ask("GET", path, None, {})
        if status != http.client.OK:
            raise ResourceError("server-answer", f"{path}: {document.get('error', status)}")
        return document

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        where = f"http://{self._host}:{self._port}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            document = msgspec.json.decode(response.read(), type=dict[str, Any])
        except TimeoutError:
            text = f"the server at {where} does not answer within {ANSWER_S:g} s: it is stopped, or hangs"
            raise ResourceError("server-silent", f"{text}. When it goes on, it may do what was asked") from None
        except OSError as problem:
            raise ResourceError("server-absent", f"no server answers at {where}: {problem.strerror}") from None
        except (http.client.HTTPException, msgspec.MsgspecError):
            raise ResourceError("server-absent", f"what answers at {where} is no kvserver") from None
        finally:
            connection.close()
        return response.status, document


def in_force(config: Config) -> tuple[dict[str, int | str], dict[str, str]]:
    """The configuration of the server at the HTTP port of `config`: values, and where each comes from.

    An origin says when a value is not the one that `config` would begin with."""
    host = config.http_host if config.http_host not in EVERYWHERE else "localhost"
    client = AdminClient(
        f"http://[{host}]:{config.http_port}" if ":" in host else f"http://{host}:{config.http_port}", ""
    )
    document = client.get("/config")
    values = {key.name: document["values"][key.name] for key in KEYS}
    origins = {}
    for key in KEYS:
        own = getattr(config, key.name)
        origins[key.name] = "changed since the start" if key.name in document["changed_since_start"] else "start"
        if own != values[key.name]:
            origins[key.name] += f"; these flags and this file say {key.toml(own)}"
    return values, origins


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: str) -> str:
    """The caller's token from a file, or from the environment if the path is empty. Raises ConfigError.

    The server's own token file may be used if it has one token."""
    if not path:
        token = os.environ.get(ENVIRONMENT, "")
        if not token:
            raise ConfigError("admin-token", f"name a file with --token-file, or put the token into ${ENVIRONMENT}")
        return _checked(token.strip(), f"${ENVIRONMENT}")
    text = file_text(path, "admin-token")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) != 1:
        raise ConfigError("admin-token", f"{path} has {len(lines)} tokens; the file of a caller has one")
    return _checked(lines[0].rpartition(":")[2].strip() if ": " in lines[0] else lines[0], path)


def _checked(token: str, origin: str) -> str:
    """A token that an HTTP header can carry."""
    if not re.fullmatch("[!-~]+", token):
        raise ConfigError("admin-token", f"the token of {origin} must be printable ASCII without spaces")
    return token


LEFT = {
    "no-disk": "there is no disk tier",
    "room": "all that may go from the disks was used later, or is guaranteed",
    "second-touch": "nobody has asked for it again (disk_admission)",
    "shape": "its namespaces fit no disk",
    "device": "their device takes no writes",
    "budget": "the daily bytes of the devices are spent",
    "late": "it was not written in time",
    "other": "it is in use, or of no whole chunk",
}
"""Why a drained server still holds something in DRAM alone (Status.drain_left), in words."""


def left_in_words(left: Mapping[str, int]) -> str:
    """The reasons and bytes of what could not be drained; empty when everything was."""
    return "; ".join(f"{count:,} bytes: {LEFT.get(why, why)}" for why, count in left.items())


def wait_drained(
    client: AdminClient, show: Callable[[str], None], *, sleep_s: Callable[[float], None] = time.sleep
) -> dict[str, int]:
    """Waits until the server is drained. Returns reason -> bytes that are still in DRAM alone.

    Raises ResourceError when somebody has ended the drain, or when another server answers."""
    said, polls = "", 0
    while True:
        status = client.get("/status")
        polls += 1
        line = f"waits for {status['drain_waits']}, {status['dirty_bytes']:,} bytes are in DRAM alone"
        if status["drain"] == "drained":
            return dict(status["drain_left"])
        if status["drain"] != "draining" and (said or polls > STALE_POLLS):
            raise ResourceError("not-draining", "the server takes stores again")
        if status["drain"] and line != said:
            show(line)
            said = line
        sleep_s(POLL_S)

"""The names by which a browser may address this server: the guard against DNS rebinding.

A hostile web page may have its own name resolve to 127.0.0.1, or to any machine that the browser reaches. The browser
then takes our answer for the page's own, and the page can read it. But the page cannot change the Host header, which
still has the page's name. So a request with a name that is not ours is refused.

Any IP address as Host is accepted: no name was looked up, so none was rebound. Prometheus and kubelet use the address
of the pod, also where http_host is 0.0.0.0. A request without Host is accepted as well, since no browser sends one.
Names that a DNS gives to this machine are unknown here; http_names lists them.
"""

import ipaddress
import re
import socket
from http import HTTPStatus

_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*)", re.IGNORECASE)
_PORT = re.compile(r":[0-9]{0,5}\Z")
SHOWN_MAX = 100


class Names:
    """Loopback, this machine's own name, and those that the operator has configured."""

    def __init__(self, host: str, listed: str) -> None:
        """host: the one that the server listens at. listed: further names, with commas between them."""
        names = ("localhost", socket.gethostname(), host, *listed.split(","))
        self._known = {_plain(name) for name in names} - {""}

    def problem(self, head: bytes) -> tuple[HTTPStatus, str] | None:
        """Why a request with this head is refused; None when it may be answered."""
        hosts = _HOST.findall(head)
        if not hosts:
            return None
        if len(hosts) > 1:
            return HTTPStatus.BAD_REQUEST, f"expected one Host header, got {len(hosts)}"
        said = hosts[0].decode("latin-1").strip()
        name = _plain(_PORT.sub("", said))
        if name in self._known or name.endswith(".localhost") or _is_address(name):
            return None
        return (
            HTTPStatus.MISDIRECTED_REQUEST,
            f"Host {said[:SHOWN_MAX]!r} is no name of this server; expected an IP address, localhost, the name of this "
            "machine, or one of http_names",
        )


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """Whether a Host is an IP address. IPv6 has brackets there, as in [::1], to tell its colons from a port's."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True

"""Which names a browser may call this server by: the guard against DNS rebinding.

A web page of a stranger may have its own name point to 127.0.0.1, or to any machine that the browser reaches. Then the
browser takes what we answer for the page's own, and the page reads it. It cannot change the Host header, which still
says the stranger's name. So a name that is not ours is refused.

An IP address as Host is let through, whatever it is: no name was looked up, so none was rebound. Prometheus and kubelet
ask by the address of the pod, also where http_host is 0.0.0.0. A request without Host is let through as well, since no
browser sends one. Names that others gave to this machine in their DNS are unknown here; http_names lists them.
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
        """host: that the server listens at. listed: others, with commas between them."""
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
    """[::1] has brackets in a Host header, so that its colons are no port."""
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True

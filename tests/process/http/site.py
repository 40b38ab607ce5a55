"""A server with HTTP: its pages and its commands."""

import http.client
import json
import re
import urllib.error
import urllib.request
from http import HTTPStatus

from tests.process.harness import WAIT_S, Server, free_port


class Site:
    """A server with HTTP, and access to its pages."""

    def __init__(self, **settings: object) -> None:
        self.port = free_port()
        self.server = Server(http_port=self.port, **settings)

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def is_healthy(self) -> bool:
        try:
            return self.page("/healthz")[0] == HTTPStatus.OK
        except OSError:
            return False

    def sample(self, name: str) -> float | None:
        """One value of /metrics."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.page("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found is not None else None

    def chunks(self) -> tuple[int, float] | None:
        """Number of chunks according to (/status, /metrics); None while the brain has reported nothing yet."""
        (status, document), metric = self.page("/status"), self.sample("kvserver_chunks")
        return (json.loads(document)["chunks"], metric) if status == HTTPStatus.OK and metric is not None else None


def ask(
    server: Server, path: str, body: object = None, *, token: str | None, method: str = "POST"
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", int(str(server.settings["http_port"])), timeout=WAIT_S)
    try:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        if response.status == http.client.UNAUTHORIZED:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.headers["Allow"] == "POST"
        return response.status, json.loads(response.read())
    finally:
        connection.close()

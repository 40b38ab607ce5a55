"""Dynamo's standalone KV indexer, which reads what vLLM publishes. Only with KVSERVER_DYNAMO_PYTHON.

python -m venv V && V/bin/pip install --no-deps ai-dynamo-runtime==1.6.1 && V/bin/pip install pydantic uvloop
KVSERVER_DYNAMO_PYTHON=V/bin/python .venv/bin/python -m pytest -k dynamo tests/unit/vllm
"""

import json
import os
import socket
import subprocess
from typing import Any
from urllib.request import Request, urlopen

import zmq

from tests.process.harness import until

PYTHON = os.environ.get("KVSERVER_DYNAMO_PYTHON", "")
MODEL, WORKER = "m", 1


class Indexer:
    """A publisher in vLLM's place, and the indexer that subscribes to it."""

    def __init__(self, *, block_tokens: int) -> None:
        self._context = zmq.Context(1)
        self._publisher = self._context.socket(zmq.XPUB)  # tells of the subscription
        port = self._publisher.bind_to_random_port("tcp://127.0.0.1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        options = ["--block-size", block_tokens, "--port", self._port, "--model-name", MODEL, "--threads", 1]
        workers = f"{WORKER}=tcp://127.0.0.1:{port}"
        command = [PYTHON, "-m", "dynamo.indexer", *map(str, options), "--workers", workers]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._sequence = 0
        assert self._publisher.poll(20_000), "the indexer does not subscribe"
        self._publisher.recv()

    def publish(self, payload: bytes) -> None:
        self._publisher.send_multipart((b"", self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    def wait_for(self, token_ids: list[int], expected: dict[str, int]) -> None:
        """Waits until so many leading tokens are found down to each tier. It always counts those of faster tiers."""
        until(f"the indexer to find {expected}", lambda: self.found(token_ids) == expected)

    def found(self, token_ids: list[int]) -> dict[str, int]:
        body = json.dumps({"token_ids": token_ids, "model_name": MODEL}).encode()
        asked = Request(f"http://127.0.0.1:{self._port}/query", data=body, headers={"content-type": "application/json"})
        with urlopen(asked, timeout=10) as answer:
            instances: dict[str, Any] = json.load(answer)["instances"]
        told = instances.get(str(WORKER), {"cpu": 0, "disk": 0})
        return {tier: told[tier] for tier in ("cpu", "disk")}

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._context.destroy(linger=0)

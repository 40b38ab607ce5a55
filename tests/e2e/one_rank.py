"""Our connector, in which rank 1 fails its loads while a certain file exists.

vLLM loads it by kv_connector_module_path. A lost GPU or mover ends the same way: one rank reports failed loads, and
the other rank's blocks hold the right bytes.
"""

import os
from pathlib import Path
from typing import Any

from kvclient.client import Client
from kvclient.vllm.connector import KvServerConnector
from kvserver.errors import RequestError
from tests.e2e.engine import RANK_FAILS

FAILING = 1


class FailsOnOneRank(KvServerConnector):
    def _client(self, *, rank: int) -> Client:
        client = super()._client(rank=rank)
        retrieve, switch = client.retrieve, Path(os.environ[RANK_FAILS])

        def retrieve_or_fail(*arguments: Any, **more: Any) -> Any:
            if switch.exists():
                raise RequestError("cache", f"rank {rank} is told to fail")
            return retrieve(*arguments, **more)

        if rank == FAILING:
            client.retrieve = retrieve_or_fail  # type: ignore[method-assign]
        return client

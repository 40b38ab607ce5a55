"""Our connector, of which rank 1 fails the loads that it is given while there is a file of a certain name.

vLLM loads it like any other, by kv_connector_module_path. What a rank does not load on its own account, be it that its
GPU or its mover is lost, ends like this: one rank says so, and the blocks of the other hold what they should.
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

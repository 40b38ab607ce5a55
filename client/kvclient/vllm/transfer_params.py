"""kv_transfer_params: what a proxy that splits prefill and decode says of a request, and what it is told to pass on.

Proxies of vLLM, llm-d and Dynamo send one request twice. The engine that computes the prompt gets do_remote_decode. It
answers with params that the proxy passes on to the engine that decodes, with do_remote_prefill. Some proxies send both
at once. remote_num_tokens says how much of the prompt the first engine has stored. llm-d has another pair of words,
those of vLLM's own tier between peers: remote_decoder and remote_prefiller. The other keys say where blocks are; here
nobody reads them, because the server has the chunks under their own names.

Rule: whatever comes, no request fails because of it. What is not understood counts as absent, with one warning.
"""

import logging
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvclient.offload.values import Side
from kvclient.vllm.keys import Request

log = logging.getLogger("vllm.kvserver.scheduler")

SIDES = ("do_remote_decode", "remote_decoder", "do_remote_prefill", "remote_prefiller")


class Said(NamedTuple):
    """A proxy's words about a request."""

    side: Side = ""
    tokens: int | None = None
    """Leading tokens of a consumer's prompt that its producer has stored. None: it did not say."""


class TransferParams:
    """Reads the params of one engine's requests, and answers those of its producers."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._host = socket.gethostname()
        self._warned: set[str] = set()

    def said_of(self, request: Request) -> Said:
        params = getattr(request, "kv_transfer_params", None)
        if params is None:
            return Said()
        if not isinstance(params, Mapping):
            return self._absent("they must be a mapping", params)
        decodes, prefills = params.get("do_remote_decode"), params.get("do_remote_prefill")
        if not isinstance(decodes, bool | None) or not isinstance(prefills, bool | None):
            return self._absent("do_remote_decode and do_remote_prefill must be true, false or null", decodes, prefills)
        decoder, prefiller = params.get("remote_decoder"), params.get("remote_prefiller")
        if not isinstance(decoder, Mapping | None) or not isinstance(prefiller, Mapping | None):
            return self._absent("remote_decoder and remote_prefiller must be mappings or null", decoder, prefiller)
        decodes, prefills = decodes or decoder is not None, prefills or prefiller is not None
        if decodes and prefills:
            return self._absent(f"the first and the last two of {SIDES} exclude each other", *map(params.get, SIDES))
        if not prefills:
            return Said("producer" if decodes else "")
        tokens = params.get("remote_num_tokens")
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            self._absent("remote_num_tokens must be a number of tokens or null", tokens)
            tokens = None
        return Said("consumer", tokens)

    def answer(
        self, request: str, tables: Sequence[Sequence[int]], *, held_tokens: int, is_there: bool
    ) -> dict[str, Any]:
        """The params that the proxy passes on, with the keys that proxies look for. No blocks are held back.

        held_tokens: leading tokens that were stored. The second engine expects no more of a longer prompt.

        is_there: False if the prompt was not stored whole. Then the second engine need not wait for a sign of it.
        """
        return {
            "do_remote_prefill": is_there,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request,
            "remote_block_ids": [list(table) for table in tables],
            "remote_num_tokens": held_tokens,
            "remote_host": self._host,
            "remote_port": 0,
        }

    def _absent(self, why: str, *came: object) -> Said:
        """Warn once for each reason. Types alone are shown: a client may nest values too deeply for a repr()."""
        if why not in self._warned:
            self._warned.add(why)
            types = [type(value).__name__ for value in came]
            log.warning("kv_transfer_params count as absent: %s; of these types came: %s", why, types)
        return Said()


def tell_dynamo(connector: str) -> None:
    """Have a worker of NVIDIA Dynamo send the connector the params of NIXL's.

    A worker that prefills refuses the connectors that are not in its table. Beside NIXL's own connector, in
    MultiConnector, the params stay that one's. Outside Dynamo, and with a table of another kind, this does nothing.
    """
    protocols = sys.modules.get("dynamo.vllm.kv_connector_protocols")
    known = getattr(protocols, "KV_CONNECTOR_PROTOCOLS", None)
    nixl = known.get("NixlConnector") if isinstance(known, dict) else None
    if isinstance(known, dict) and isinstance(nixl, type):
        known.setdefault(connector, type(f"{connector}Protocol", (nixl,), {"produces_kv_transfer_params": False}))

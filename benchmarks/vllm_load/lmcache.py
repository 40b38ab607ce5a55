"""LMCache's multi-process server, for an arm of its own: its command, and the connector that finds it.

Held against the sources of LMCache 0.5.6. The arm is to be compared, so it gets what kvserver gets: the same bytes of
host memory, taken at the start; the same tokens a chunk; and the answers are stored as well. All else is its default.
"""

import importlib.util
import json
import shlex
import sys

GIB = 1 << 30
CHUNK_TOKENS = 256
PACKAGE = "lmcache"


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def server_command(*, host: str, port: int, http_port: int, arena_bytes: int, further: str) -> list[str]:
    """The command of the server. further: more of its arguments, as in a shell; they win."""
    return [
        *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", host, "--port", str(port)),
        *("--http-host", host, "--http-port", str(http_port), "--chunk-size", str(CHUNK_TOKENS)),
        *("--l1-size-gb", f"{arena_bytes / GIB:g}", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *shlex.split(further),
    ]


def health_url(*, host: str, http_port: int) -> str:
    return f"http://{host}:{http_port}/healthcheck"


def transfer_config(*, host: str, port: int) -> str:
    """JSON for --kv-transfer-config. The connector is LMCache's own, not the copy of an older one in vLLM."""
    return json.dumps(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{host}",
                "lmcache.mp.port": port,
                "lmcache.mp.save_decode_cache": True,
            },
        }
    )

"""The README's example code and commands, run as printed there."""

import os
import re
from pathlib import Path

from kvserver._native import create_memfd
from tests.process.engine import PATIENT
from tests.process.harness import Server, until

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
BLOCKS, REGIONS, PAGE_BYTES, CHUNKS = 67, 3, 129, 3
SOCKET = '"/run/kvserver/kvserver.sock"'


def example() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert found.count(SOCKET) == 1
    return str(found)


def test_the_example_stores_and_another_process_of_the_engine_retrieves_what_it_stored() -> None:
    """Runs it twice.

    The first run finds nothing; the second finds the first's bytes and loads them into other blocks."""
    with Server() as server:
        lines = example().replace(SOCKET, "socket, timeouts=timeouts")
        pools = [create_memfd("tests-readme", REGIONS * BLOCKS * PAGE_BYTES) for _ in range(2)]
        until("the arena to be touched", lambda: (arena := server.status().arena).slabs_ready == arena.slabs_total)
        content = os.urandom(REGIONS * BLOCKS * PAGE_BYTES)
        os.pwrite(pools[0], content, 0)
        placed = [list(range(3, 3 + 16 * CHUNKS)), list(range(BLOCKS - 1, BLOCKS - 1 - 16 * CHUNKS, -1))]
        for pool, block_ids in zip(pools, placed, strict=True):
            names = {
                "socket": server.path,
                "timeouts": PATIENT,
                "memfd": pool,
                "pool_bytes": len(content),
                "blocks": BLOCKS,
                "regions": REGIONS,
                "page_bytes": PAGE_BYTES,
                "model_digest": bytes(32),
                "token_ids": list(range(CHUNKS * 256 + 5)),
                "block_ids": block_ids,
            }
            exec(compile(lines, "README.md", "exec"), names)
            found, client = names["found"], names["client"]
            assert found.chunks == (CHUNKS if pool is pools[1] else 0)  # type: ignore[attr-defined]
            client.close()  # type: ignore[attr-defined]
        arrived = os.pread(pools[1], len(content), 0)
        for region in range(REGIONS):
            for source, target in zip(*placed, strict=True):
                here, there = ((region * BLOCKS + block) * PAGE_BYTES for block in (source, target))
                assert arrived[there : there + PAGE_BYTES] == content[here : here + PAGE_BYTES]
        for pool in pools:
            os.close(pool)


def test_it_is_ten_lines_and_no_more_than_a_few() -> None:
    statements = [line for line in example().splitlines() if line and not line.startswith((" ", "from", "client ="))]
    assert len(statements) <= 10


def test_the_files_that_the_readme_names_exist() -> None:
    root = Path(__file__).resolve().parents[3]
    linked, quoted = r"\]\(([^)#]+)\)", r"`((?:tests|deploy|kvserver)/[\w/.]+)`"
    named = set(re.findall(linked, README)) | set(re.findall(quoted, README))
    assert {name for name in named if not (root / name).exists()} == set()

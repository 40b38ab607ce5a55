"""Prompts on disk come back while leases keep all of DRAM."""

from pathlib import Path

from tests.process.disk.scene import ALL, CHUNKS, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import Engine, Prompt
from tests.process.harness import until


def test_every_prompt_comes_back_from_disk_while_leases_that_nobody_uses_keep_all_of_dram(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    """What these leases keep is read again when they are used at last."""
    with (
        small(tmp_path) as server,
        Engine(server.path, SHAPE) as engine,
        Engine(server.path, SHAPE, name="hoarder") as hoarder,
    ):
        disk_ready(server)
        engine.ready()
        hoarder.ready()
        store_slowly(server, engine, stories)
        leases = [until("a lease", lambda story=story: hoarder.lookup(story).lease) for story in stories]
        assert sum(lease.chunks for lease in leases) == ALL
        assert server.status().arena.used_bytes > 0.9 * server.status().arena.total_bytes
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
        for story, lease in zip(stories, leases, strict=True):
            where = hoarder.ready().spare(hoarder.place(story))
            assert hoarder.begin_retrieve(lease, where).result(20).ok
            hoarder.pool.expect(story, where)
            assert hoarder.pool.wrong() == 0
        assert server.status().leases == 0
        assert server.status().chunks_on_disk >= len(stories) * CHUNKS

"""The arena's memory: on the NUMA node, and on pages of the size, that were configured."""

import re
from pathlib import Path

import pytest

from kvserver._native import free_huge_pages
from kvserver.config.config import Config
from kvserver.supervisor import numa
from tests.process.engine import Engine, prompt
from tests.process.harness import Server, kill, until

MIB = 1 << 20
HUGE_PAGES = 8

needs_numa_maps = pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")


def line_of(pid: int) -> str:
    """The kernel's line about the arena in a process that maps it (/proc/PID/numa_maps)."""
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "memfd:kvserver-arena" in line:
            return line
    raise AssertionError(f"process {pid} does not map the arena")


def arena_of(pid: int) -> tuple[str, set[int]]:
    """(policy, nodes of the pages that are mapped there)."""
    line = line_of(pid)
    return line.split()[1], {int(node) for node in re.findall(r" N(\d+)=\d+", line)}


@needs_numa_maps
@pytest.mark.parametrize("node", [0, -1])
def test_the_arena_is_placed_as_configured_and_status_says_where(node: int) -> None:
    """A mover maps the arena later, by itself.

    The policy belongs to the memory, so the mover's mapping shows it too."""
    story = prompt(1, chunks=3)
    placement = numa.place(Config(numa_node=node))
    shown = ",".join(map(str, placement.nodes))
    policy = "default" if not shown else f"prefer:{shown}" if len(placement.nodes) == 1 else f"interleave:{shown}"
    with Server(arena_bytes=16 * MIB, slab_bytes=MIB, numa_node=node) as server, Engine(server.path) as engine:
        engine.ready().store(story)
        until("the arena to be touched", lambda: server.status().arena.slabs_ready == 16)
        found, nodes = arena_of(server.mover_pid())
        assert found == policy
        assert server.status().arena.placement == str(placement)
        assert nodes, "the mover has written a chunk"
        assert node == -1 or nodes == {node}
        assert engine.retrieve(story) == 3


@needs_numa_maps
@pytest.mark.skipif(free_huge_pages(2 * MIB) < HUGE_PAGES, reason=f"{HUGE_PAGES} huge pages of 2 MiB are not reserved")
def test_the_arena_lies_on_huge_pages_that_were_reserved_and_gives_them_back() -> None:
    story, free = prompt(1, chunks=3), free_huge_pages(2 * MIB)
    arena_bytes = HUGE_PAGES * 2 * MIB
    with Server(arena_bytes=arena_bytes, slab_bytes=4 * MIB, huge_page_bytes=2 * MIB) as server:
        with Engine(server.path) as engine:
            engine.ready().store(story)
            until("the arena to be touched", lambda: server.status().arena.slabs_ready == HUGE_PAGES // 2)
            assert free_huge_pages(2 * MIB) <= free - HUGE_PAGES
            assert "kernelpagesize_kB=2048" in line_of(server.mover_pid())
            assert engine.retrieve(story) == 3
        brain = server.brain_pid()
        kill(brain)
        until("another brain", lambda: server.brain_pid() != brain)
        with Engine(server.path) as engine:
            assert engine.ready().retrieve(story) == 3, "its index is rebuilt on huge pages as well"
    until("the pages to be free again", lambda: free_huge_pages(2 * MIB) == free)

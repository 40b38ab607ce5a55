"""Where the arena's memory is: on the NUMA node that was asked for."""

import re
from pathlib import Path

import pytest

from tests.process.engine import Engine, prompt
from tests.process.harness import Server, until

MIB = 1 << 20


def arena_of(pid: int) -> tuple[str, set[int]]:
    """(policy, nodes of the pages that are mapped there) of the arena in a process that maps it."""
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "memfd:kvserver-arena" in line:
            return line.split()[1], {int(node) for node in re.findall(r" N(\d+)=\d+", line)}
    raise AssertionError(f"process {pid} does not map the arena")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
@pytest.mark.parametrize(("node", "policy"), [(0, "prefer:0"), (-1, "default")])
def test_the_arena_is_placed_as_configured(node: int, policy: str) -> None:
    """A mover maps it later and for itself; the policy is the memory's own, so it is seen there as well."""
    story = prompt(1, chunks=3)
    with Server(arena_bytes=16 * MIB, slab_bytes=MIB, numa_node=node) as server, Engine(server.path) as engine:
        engine.ready().store(story)
        until("the arena to be touched", lambda: server.status().arena.slabs_ready == 16)
        found, nodes = arena_of(server.mover_pid())
        assert found == policy
        assert nodes, "the mover has written a chunk"
        assert node == -1 or nodes == {node}
        assert engine.retrieve(story) == 3

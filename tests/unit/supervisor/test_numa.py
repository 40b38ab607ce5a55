"""Placement of the arena on machines made of files: which GPUs count, and which memory is near them."""

import os
from pathlib import Path

import pytest

from kvserver.cli.doctor import doctor
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.supervisor import numa, supervisor
from kvserver.supervisor.numa import Gpu, Placement, gpus, place
from kvserver.transfer.native import create_memfd

NVIDIA, AMD, ASPEED = "0x10de", "0x1002", "0x1a03"


class Machine:
    """/sys, /proc and /dev of a machine with as many nodes as `distances` has rows."""

    def __init__(self, root: Path, *distances: str, memory: str = "") -> None:
        self.root = root
        last = len(distances) - 1
        nodes = root / "sys/devices/system/node"
        for node, row in enumerate(distances):
            (nodes / f"node{node}").mkdir(parents=True)
            (nodes / f"node{node}/distance").write_text(f"{row}\n")
        (nodes / "online").write_text(f"0-{last}\n" if last else "0\n")
        (nodes / "has_memory").write_text(f"{memory or (f'0-{last}' if last else '0')}\n")
        self.policy("default")

    def policy(self, name: str) -> None:
        (self.root / "proc/self").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/self/numa_maps").write_text(f"00400000 {name} file=/usr/bin/python mapped=3 N0=3\n")

    def add(
        self, address: str, node: int, *, vendor: str = NVIDIA, kind: str = "0x030200", driver: str = "nvidia"
    ) -> None:
        device = self.root / "sys/bus/pci/devices" / address
        (device / "drm").mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (device / name).write_text(f"{text}\n")
        drivers = self.root / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(drivers)

    def add_amd(self, address: str, node: int, render: str, *, given: bool) -> None:
        self.add(address, node, vendor=AMD, kind="0x120000", driver="amdgpu")
        (self.root / "sys/bus/pci/devices" / address / "drm" / render).mkdir()
        (self.root / "dev/dri").mkdir(parents=True, exist_ok=True)
        if given:
            (self.root / "dev/dri" / render).touch()


@pytest.fixture
def two(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "10 21", "21 10")


def nodes(machine: Machine, **keys: int) -> tuple[int, ...]:
    return place(Config(**keys), machine.root).nodes


def test_the_arena_is_on_the_node_of_all_gpus(two: Machine) -> None:
    two.add("0000:9a:00.0", 1)
    two.add("0000:9b:00.0", 1)
    placement = place(Config(), two.root)
    assert placement.nodes == (1,)
    assert str(placement) == "node 1: GPU 0000:9a:00.0 on 1, GPU 0000:9b:00.0 on 1"
    assert not placement.asked_for


def test_gpus_on_two_nodes_have_the_arena_on_both_in_turn(two: Machine) -> None:
    two.add("0000:9a:00.0", 1)
    two.add("0000:17:00.0", 0)
    placement = place(Config(), two.root)
    assert placement.nodes == (0, 1)
    assert str(placement) == "nodes 0, 1 in turn: GPU 0000:17:00.0 on 0, GPU 0000:9a:00.0 on 1"


def test_nodes_without_gpus_have_none_of_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")
    machine.add("0000:17:00.0", 0)
    machine.add("0000:c1:00.0", 3)
    assert nodes(machine) == (0, 3)


def test_numa_node_has_the_last_word(two: Machine) -> None:
    two.add("0000:9a:00.0", 1)
    placement = place(Config(numa_node=0), two.root)
    assert (placement.nodes, placement.asked_for, str(placement)) == ((0,), True, "node 0: numa_node")


def test_what_numactl_said_is_left_alone(two: Machine) -> None:
    two.add("0000:9a:00.0", 1)
    two.policy("bind:0")
    placement = place(Config(), two.root)
    assert placement.nodes == ()
    assert "a memory policy of its own (bind:0)" in str(placement)


def test_one_node_or_no_gpu_is_the_kernels_business(tmp_path: Path, two: Machine) -> None:
    assert str(place(Config(), two.root)) == "wherever the kernel puts it: no GPU is seen"
    one = Machine(tmp_path / "one", "10")
    one.add("0000:17:00.0", 0)
    assert str(place(Config(), one.root)) == "wherever the kernel puts it: this machine has one node"
    assert place(Config(), tmp_path / "nothing").nodes == ()


def test_a_gpu_of_which_no_node_is_known_names_none(two: Machine) -> None:
    two.add("0000:17:00.0", -1)
    placement = place(Config(), two.root)
    assert placement.nodes == ()
    assert "GPU 0000:17:00.0 on no node that is known" in str(placement)


def test_only_gpus_that_engines_can_use_count(two: Machine) -> None:
    two.add("0000:02:00.0", 0, vendor=ASPEED, kind="0x030000", driver="ast")
    two.add("0000:17:00.0", 0, driver="vfio-pci")
    two.add("0000:9a:00.1", 0, kind="0x040300")
    two.add("0000:9a:00.0", 1)
    assert list(gpus(two.root)) == [Gpu("0000:9a:00.0", 1)]


def test_a_containers_own_gpus_count(two: Machine) -> None:
    for address, node in (("0000:17:00.0", 0), ("0000:9a:00.0", 1)):
        two.add(address, node)
    (two.root / "proc/driver/nvidia/gpus/0000:9a:00.0").mkdir(parents=True)
    assert nodes(two) == (1,)


def test_amd_gpus_count_when_their_device_files_are_there(two: Machine) -> None:
    two.add_amd("0000:05:00.0", 0, "renderD128", given=True)
    two.add_amd("0000:85:00.0", 1, "renderD129", given=False)
    assert list(gpus(two.root)) == [Gpu("0000:05:00.0", 0)]


def test_a_node_without_memory_gives_way_to_its_nearest(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "10 21 17", "21 10 28", "17 28 10", memory="0-1")
    machine.add("0000:17:00.0", 2)
    assert nodes(machine) == (0,)


def test_doctor_says_which_nodes_and_why(two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    two.add("0000:17:00.0", 0)
    two.add("0000:9a:00.0", 1)
    monkeypatch.setattr(doctor.numa, "place", lambda config: place(config, two.root))
    monkeypatch.setattr(doctor.numa, "gpus", lambda *_: gpus(two.root))
    monkeypatch.setattr(doctor, "_refused_nodes", lambda nodes: "")
    said = "nodes 0, 1 in turn: GPU 0000:17:00.0 on 0, GPU 0000:9a:00.0 on 1"
    assert doctor.memory_nodes(Config()) == ("ok", f"{said}; each GPU has a part of every chunk near")
    verdict, text = doctor.memory_nodes(Config(numa_node=0))
    assert verdict == "warn"
    assert text.endswith("copies of the others cross the link between the sockets")
    monkeypatch.setattr(doctor, "_refused_nodes", lambda nodes: "Operation not permitted")
    verdict, text = doctor.memory_nodes(Config())
    assert verdict == "warn"
    assert text == f"{said}: Operation not permitted; in a container it takes the capability SYS_NICE"
    assert doctor.memory_nodes(Config(numa_node=0))[0] == "fail"


def test_nodes_that_the_kernel_refuses_are_given_up_unless_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without SYS_NICE: a cache far from its GPUs is better than none."""
    config = Config(arena_bytes=3 << 20, slab_bytes=1 << 20)
    arena = create_memfd("arena", config.arena_bytes)
    monkeypatch.setattr(supervisor.numa, "place", lambda _: Placement((1000,), "GPU 0000:17:00.0 on 1000"))
    grower, placement = supervisor._grow(config, arena)
    grower.close()
    assert str(placement).startswith("wherever the kernel puts it: not on the nodes of the GPUs, as the kernel refused")
    assert [record.getMessage() for record in caplog.records] == ["arena not near GPUs"]
    monkeypatch.setattr(supervisor.numa, "place", lambda _: Placement((1000,), "numa_node", asked_for=True))
    with pytest.raises(ConfigError, match="NUMA node 1000"):
        supervisor._grow(config, arena)
    os.close(arena)


def test_this_machine_has_some_placement() -> None:
    assert str(numa.place(Config()))

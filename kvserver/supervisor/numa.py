"""The choice of NUMA nodes for the arena: those of the GPUs, unless the operator or numactl says otherwise.

A GPU reads memory of the other socket through the link between the sockets, which all GPUs of a socket share. So with
GPUs on one node, the arena is placed there. With GPUs on several nodes, its pages are interleaved over them: a part of
each chunk is near to every GPU, and the links are shared evenly. One server cannot do better, since any GPU may ask for
any chunk; decision 0005 describes one server per socket.

/sys lists all GPUs of the machine. In a container, only those with a device file there count.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvserver.config.config import Config
from kvserver.config.paths import outside_memory

VENDORS = {"0x10de": "nvidia", "0x1002": "amdgpu"}
"""PCI vendor -> the kernel's driver: a GPU with another one, such as vfio-pci, is not for engines of this machine."""
CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes, first 16 bits: display and 3D controllers, processing accelerators. The GPU's audio has another one."""


class Gpu(NamedTuple):
    address: str
    """Address on the PCI bus."""
    node: int
    """NUMA node. -1: the machine does not say, mostly because it has only one."""


class Placement(NamedTuple):
    """The nodes for the arena, and the reason."""

    nodes: tuple[int, ...]
    """Nodes over which the pages are interleaved. Empty: the kernel decides."""
    why: str
    asked_for: bool = False
    """Whether numa_node names the node; then the start fails if the kernel refuses it."""
    outside: bool = False
    """Whether the arena lies on a medium of its own, where nothing is placed."""

    def __str__(self) -> str:
        if self.outside:
            return self.why
        if not self.nodes:
            return f"wherever the kernel puts it: {self.why}"
        shown = ", ".join(map(str, self.nodes))
        return f"nodes {shown} in turn: {self.why}" if len(self.nodes) > 1 else f"node {shown}: {self.why}"


def place(config: Config, root: Path = Path("/")) -> Placement:
    """Chooses the nodes. root: the directory with /sys, /proc and /dev."""
    if config.numa_node >= 0:
        return Placement((config.numa_node,), "numa_node", asked_for=True)
    if where := outside_memory(config.arena_path):
        return Placement((), where, outside=True)
    with_memory = _nodes_with_memory(root)
    if len(with_memory) < 2:
        return Placement((), "this machine has one node")
    if policy := _inherited_policy(root):
        return Placement((), f"the server was started with a memory policy of its own ({policy})")
    found = list(gpus(root))
    if not found:
        return Placement((), "no GPU is seen")
    near = {_nearest(root, gpu.node, with_memory) for gpu in found if gpu.node >= 0}
    shown = ", ".join(f"GPU {gpu.address} on {gpu.node if gpu.node >= 0 else 'no node that is known'}" for gpu in found)
    return Placement(tuple(sorted(near)), shown)


def gpus(root: Path = Path("/")) -> Iterator[Gpu]:
    """The GPUs of this machine, or of this container, ordered by address."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        driver = VENDORS.get(_read(device / "vendor"))
        if driver is None or _read(device / "class")[:6] not in CLASSES:
            continue
        if (device / "driver").resolve().name == driver and _is_given(root, device, driver):
            yield Gpu(device.name, int(_read(device / "numa_node") or -1))


def _is_given(root: Path, device: Path, driver: str) -> bool:
    """Whether this container has the GPU: NVIDIA's tools list them in /proc; AMD GPUs have a device file in it."""
    if driver == "nvidia":
        listed = root / "proc/driver/nvidia/gpus"
        return not listed.is_dir() or (listed / device.name).exists()
    renders = [render.name for render in (device / "drm").glob("renderD*")]
    return any((root / "dev/dri" / name).exists() for name in renders)


def _nodes_with_memory(root: Path) -> list[int]:
    return _listed(_read(root / "sys/devices/system/node/has_memory"))


def _nearest(root: Path, node: int, with_memory: list[int]) -> int:
    """The node itself if it has memory, else the node with memory at the shortest distance."""
    if node in with_memory:
        return node
    ways = [int(word) for word in _read(root / f"sys/devices/system/node/node{node}/distance").split()]
    numbered = dict(zip(_listed(_read(root / "sys/devices/system/node/online")), ways, strict=False))
    return min(with_memory, key=lambda other: numbered.get(other, 255))


def _inherited_policy(root: Path) -> str:
    """The process's memory policy, as numactl sets it; empty if there is none.

    A mapping without its own policy shows that of the process."""
    words = _read(root / "proc/self/numa_maps").split(maxsplit=2)
    return words[1] if len(words) > 1 and words[1] != "default" else ""


def _listed(text: str) -> list[int]:
    """The numbers in one of the kernel's lists, such as 0-1,4."""
    nodes: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def _read(path: Path) -> str:
    """The stripped text of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

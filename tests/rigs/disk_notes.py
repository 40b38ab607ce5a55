"""Namespaces that a server with disks knows by their notes alone."""

from kvserver.wire.messages import Clear, Cleared, Unregister, Unregistered
from tests.rigs.brain_rig import Client, chain
from tests.rigs.disk_rig import CHUNKS, DiskRig


def namespace(name: str) -> bytes:
    return name.encode() * 32


def written(rig: DiskRig, name: str) -> Client:
    """An engine whose prompt is on disk."""
    client = Client(rig).register(namespace=namespace(name))
    client.store(chain(ord(name), CHUNKS))
    return client


def had(rig: DiskRig, name: str) -> None:
    """A namespace that is gone, and its engine with it."""
    client = written(rig, name)
    assert isinstance(client.ask(Unregister(rig.number(), client.cache)), Unregistered)
    assert isinstance(client.ask(Clear(rig.number(), namespace(name))), Cleared)


def names(digests: list[bytes]) -> str:
    return "".join(digest[:1].decode() for digest in digests)

"""Servers of object stores for tests, by kind: how each starts, how a store there is opened, and its driver."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvserver.remote.objects.clouds import CloudObjects
from kvserver.remote.objects.store import ObjectStore
from tests.rigs.azure_server import AzureServer
from tests.rigs.s3_server import S3Server, cloud_objects, s3_store


class Kind(NamedTuple):
    """The last two take a server and a prefix, and `port` of a proxy before the server."""

    server: Callable[[], Any]
    store: Callable[..., ObjectStore]
    driver: Callable[..., CloudObjects]


KINDS = {
    "s3": Kind(S3Server, s3_store, cloud_objects),
    "azure": Kind(AzureServer, AzureServer.store, AzureServer.objects),
}

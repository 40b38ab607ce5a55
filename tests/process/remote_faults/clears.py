"""Clears on one server while another is cut off from the store, or from its notes alone, again and again.

The promise: once the lease of a note is over, a server that cannot read it gives nothing from the store of a namespace
that was cleared elsewhere, although the chunks are still there. When it can read the note its own copies go, before
anything comes from the store again.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from kvserver.remote import epoch_lease
from tests.process import short_leases
from tests.process.campaign import counted
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import Server, until
from tests.process.short_leases import ShortLeaseServer
from tests.rigs.fault_proxy import FaultProxy
from tests.rigs.private_file import private_file
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 3
USER, PASSWORD = "second", "of-this-test-alone"
Cut = Literal["none", "store", "notes"]
ALL, NO_NOTES = ("~*",), ("resetkeys", "~*{*")
"""Keys that a user of the store may name. Those of chunks have a brace, those of notes have none."""


class Clears:
    """first: an engine whose server clears. second: one whose server is cut off, behind the proxy, as a user that may
    be refused the notes."""

    def __init__(
        self, first: Engine, second: Engine, valkey: ValkeyServer, proxy: FaultProxy, *, lease_s: float, seed: int
    ) -> None:
        self._first, self._second, self._valkey, self._proxy = first, second, valkey, proxy
        self._lease_s = lease_s
        self._seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self.seen: Counter[str] = Counter()

    def round(self, cut: Cut) -> None:
        before = self._keys()
        local, early, late = (self._stored() for _ in range(3))
        until("the store to have all", lambda: self._keys() >= before + 3 * CHUNKS)
        self._until_second_has(local)
        self._begin(cut)
        self._first.client.clear(self._first.namespace)
        answered_s = time.monotonic()
        if cut != "none":
            self._while_cut(local, early, late, answered_s)
        self._end(cut)
        later = self._stored()
        self._until_second_has(later, and_then=lambda: self._is_gone(local))
        for cleared in (early, late):
            self._is_gone(cleared)
        self.seen[f"cut off: {cut}"] += 1

    def _begin(self, cut: Cut) -> None:
        if cut == "store":
            self._proxy.cut()
        elif cut == "notes":
            self._allow(NO_NOTES)

    def _end(self, cut: Cut) -> None:
        if cut == "store":
            self._proxy.mend()
        elif cut == "notes":
            self._allow(ALL)

    def _allow(self, keys: tuple[str, ...]) -> None:
        assert self._valkey.ask("ACL", "SETUSER", USER, *keys).startswith("+OK")

    def _while_cut(self, local: Prompt, early: Prompt, late: Prompt, answered_s: float) -> None:
        """The server may serve its own copies until it reads the note, and chunks of the store until the lease ends."""
        over_s = answered_s + self._lease_s
        while time.monotonic() < over_s:
            self.seen["came within the lease"] += self._second.retrieve(early) > 0
            time.sleep(self._lease_s / 20)
        while time.monotonic() < over_s + self._lease_s:
            got = self._second.retrieve(late)
            assert got == 0, f"{got} chunks of a cleared namespace came from the store"
            self.seen["local served"] += self._second.retrieve(local) > 0
            time.sleep(self._lease_s / 20)

    def _is_gone(self, cleared: Prompt) -> None:
        assert self._second.lookup(cleared).chunks == 0, "a copy of a cleared namespace outlived its return"

    def _stored(self) -> Prompt:
        new = prompt(next(self._seeds), CHUNKS)
        self._first.store(new)
        return new

    def _keys(self) -> int:
        """Keys of the store: a chunk has one."""
        return int(self._valkey.ask("DBSIZE").strip(":\r\n"))

    def _until_second_has(self, wanted: Prompt, and_then: Callable[[], None] = lambda: None) -> None:
        def has() -> bool:
            if self._first.retrieve(wanted) < CHUNKS:  # it also offers it to the store again
                self._first.store(wanted)
            found = self._second.lookup(wanted).chunks
            if found:
                and_then()
            return found == CHUNKS

        until("it to come", has)
        assert self._second.retrieve(wanted) == CHUNKS


def run_clears(rounds: int, seed: int, *, short: bool) -> str:
    """short: leases of half a second instead of five. Otherwise the second server is cut off in every round."""
    kind: type[Server] = ShortLeaseServer if short else Server
    lease_s = short_leases.LEASE_S if short else epoch_lease.LEASE_S
    cuts: tuple[Cut, ...] = get_args(Cut)
    with (
        tempfile.TemporaryDirectory() as folder,
        ValkeyServer() as valkey,
        FaultProxy(valkey.port, seed, chance=0.0) as proxy,
    ):
        password = private_file(Path(folder) / "password", PASSWORD)
        valkey.ask("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "&*", "+@all", *ALL)
        options = "tokens_min=0&write=through"
        named = f"{options}&username={USER}&password_file={password}"
        with (
            kind(remotes=f"fleet=valkey://127.0.0.1:{valkey.port}?{options}") as one,
            kind(remotes=f"fleet=valkey://127.0.0.1:{proxy.port}?{named}") as other,
            Engine(one.path).ready() as first,
            Engine(other.path).ready() as second,
        ):
            clears = Clears(first, second, valkey, proxy, lease_s=lease_s, seed=seed)
            for number in range(rounds):
                clears.round(cuts[number % len(cuts)] if short else cuts[1 + number % 2])
    return f"{rounds} clears, {counted(clears.seen)}"

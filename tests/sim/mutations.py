"""Deliberate bugs, one line or two each: every one of them must be noticed by the simulator or a unit test."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """`old` stands exactly once in `file` (below kvserver/) and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    unseen: bool = False
    """It breaks no promise that the simulator keeps: only the unit tests are asked."""


CHUNKS, ROOM, SPACE, LEASES = (
    "service/holdings/chunks.py",
    "service/holdings/eviction.py",
    "index/space.py",
    "service/requests/lookup.py",
)
TIMERS = "service/base/timers.py"
TRANSFERS, MOVERS, RESTORE = "service/requests/transfers.py", "service/requests/movers.py", "service/disk/restore.py"

MUTATIONS = (
    # ------------------------------------------------------------ what is sealed, and when
    Mutation(
        "seal with a shard missing",
        CHUNKS,
        "        for part in parts:\n            if pending.parts.get(part) != SEALED:\n",
        "        for part in parts[:1]:\n            if pending.parts.get(part) != SEALED:\n",
    ),
    Mutation(
        "skip the dead-session check on completion",
        TRANSFERS,
        'kept = done.status == "done" and not job.session.ended',
        'kept = done.status == "done"',
    ),
    Mutation(
        "seal an abandoned store",
        TRANSFERS,
        'kept = done.status == "done" and not job.session.ended',
        'kept = done.status in ("done", "abandoned") and not job.session.ended',
    ),
    Mutation(
        "seal after a clear",
        CHUNKS,
        "            if node.state != GONE:\n                self.discard(space, node, reason)\n        self._counters",
        "            pass\n        self._counters",
    ),
    Mutation(
        "publish before done",
        CHUNKS,
        "        pending.parts[part] = job\n        return pending.slots[part]",
        "        pending.parts[part] = job\n        self.record(pending.space, node, part, pending.slots[part])\n"
        "        return pending.slots[part]",
    ),
    Mutation(
        "not discarding at the reserve deadline",
        "service/service.py",
        "        transfers.discard_overdue(core, now_ns)\n",
        "",
    ),
    Mutation(
        "reserve without giving back what was taken",
        CHUNKS,
        "                    for mine in taken.values():\n                        self.pool.free(mine)\n",
        "",
    ),
    Mutation(
        "a wrong writer in a replicated group",
        TRANSFERS,
        "mine = chunk % writers == writer",
        "mine = (chunk + 1) % writers == writer",
    ),
    Mutation(
        "a store says that another job's chunk is held",
        CHUNKS,
        "return pending is not None and pending.parts.get(part) == SEALED",
        "return pending is not None",
    ),
    # ------------------------------------------------------------ what is servable
    Mutation(
        "drop the parent-ready rule",
        SPACE,
        "if at.parent.state != READY:",
        "if at.parent.state == GONE:",
    ),
    Mutation(
        "one full group of several is enough",
        SPACE,
        'if group.kind == "full":\n                self.needed |= 1 << index',
        'if group.kind == "full":\n                self.needed = 1 << index',
    ),
    Mutation(
        "find chunks that are not ready",
        SPACE,
        "if node is not None and node.state == READY and node.depth == middle:",
        "if node is not None and node.depth == middle:",
    ),
    Mutation(
        "ignore the namespace in lookup",
        LEASES,
        "space = core.chunks.spaces.get(request.namespace)",
        "space = next(iter(core.chunks.spaces.values()), None)",
    ),
    Mutation(
        "ignore the namespace in retrieve",
        TRANSFERS,
        "if lease.space.digest != cache.digest:",
        "if lease.space.geometry != core.chunks.spaces[cache.digest].geometry:",
    ),
    Mutation(
        "window boundary off by one",
        "index/coverage.py",
        "// space.geometry.chunk_tokens)",
        "// space.geometry.chunk_tokens + 1)",
    ),
    Mutation(
        "state of the chunk before",
        "index/coverage.py",
        "            return chunks - 1\n",
        "            return max(0, chunks - 2)\n",
    ),
    Mutation(
        "partial chunk off by one in slots",
        TRANSFERS,
        "first, last = item.first_block // per_chunk, -(-last_block // per_chunk)",
        "first, last = item.first_block // per_chunk, last_block // per_chunk + 1",
    ),
    Mutation(
        "a range that starts inside a chunk starts at the next",
        TRANSFERS,
        "first, last = item.first_block // per_chunk, -(-last_block // per_chunk)",
        "first, last = -(-item.first_block // per_chunk), -(-last_block // per_chunk)",
    ),
    Mutation(
        "retrieve more than was leased", TRANSFERS, "if span.last > lease.chunks:", "if span.last > lease.chunks + 1:"
    ),
    Mutation(
        "skip the keys-chain check at retrieve",
        TRANSFERS,
        'if b"".join([node.key for node in chain]) != lease.keys:',
        "if len(chain) * KEY_BYTES != len(lease.keys):",
    ),
    # ------------------------------------------------------------ leases
    Mutation(
        "honour an expired lease",
        LEASES,
        "if lease is None or lease.expires_ns <= now_ns:",
        "if lease is None:",
    ),
    Mutation("a part of a retrieve uses up its lease", LEASES, "    if more:\n        return\n", ""),
    Mutation("lease used twice by one rank", LEASES, "if session.rank in lease.ranks_used:", "if session.rank == -2:"),
    Mutation(
        "lease of another engine",
        LEASES,
        "    if lease.engine is not session.engine:\n        raise _foreign(lease, session)\n    if not 0",
        "    if not 0",
    ),
    Mutation(
        "lease of another epoch",
        "service/requests/sessions.py",
        "    name = (request.engine, request.epoch)\n",
        "    name = (request.engine, 0)\n",
    ),
    Mutation(
        "release another engine's lease",
        LEASES,
        "        if lease.engine is not session.engine:\n"
        "            raise _foreign(lease, session)\n"
        "        core.counters",
        "        core.counters",
    ),
    Mutation(
        "a retrieve does not extend its lease",
        LEASES,
        "if extended_ns > lease.expires_ns:",
        "if extended_ns < 0:",
    ),
    Mutation(
        "not ending leases on clear",
        "service/operators/clear_namespaces.py",
        "        end_lease(core, lease)\n",
        "        pass\n",
    ),
    Mutation(
        "no end of leases with their engine",
        "service/requests/sessions.py",
        "        for number in sorted(engine.leases):\n            end_lease(core, core.leases[number])\n",
        "",
    ),
    Mutation(
        "a lease that nobody was told of lives on",
        LEASES,
        "    if lease is not None:\n        core.counters.leases_released += 1\n",
        "    if lease is not None and lease.ranks_used:\n        core.counters.leases_released += 1\n",
    ),
    Mutation(
        "a namespace in which chunks are found stays cold",
        LEASES,
        "tail.used = space.root.used = now_ns",
        "tail.used = now_ns",
        unseen=True,
    ),
    # ------------------------------------------------------------ timers
    Mutation(
        "dead timers are never swept",
        TIMERS,
        "if len(self._heap) > 2 * len(self._deadlines) + DEAD_SPARE:",
        "if len(self._heap) < 0:",
    ),
    Mutation(
        "a deadline that moved fires at its old time",
        TIMERS,
        "            if self._deadlines.get(timer) == at_ns:\n",
        "            if timer in self._deadlines:\n",
    ),
    Mutation("a lease without a timer", LEASES, '    core.timers.set(lease.expires_ns, "lease", lease.number)\n', ""),
    Mutation("a lease that is over keeps its timer", LEASES, '    core.timers.cancel("lease", lease.number)\n', ""),
    Mutation("a job that is over keeps its timer", TRANSFERS, '    core.timers.cancel("job", job.number)\n', ""),
    Mutation(
        "an attached session keeps its timer",
        "service/requests/sessions.py",
        '    session.attached_peer = peer\n    core.timers.cancel("attach", session.number)\n',
        "    session.attached_peer = peer\n",
    ),
    # ------------------------------------------------------------ what must stay
    Mutation(
        "free a pinned slot",
        "index/eviction.py",
        "    if node.pins or node.state != READY or node.depth == 0:\n",
        "    if node.state != READY or node.depth == 0:\n",
    ),
    Mutation(
        "evict a parent first",
        "index/eviction.py",
        "        return node.children is None\n",
        "        return True\n",
    ),
    Mutation("a retrieve without a pin of its own", TRANSFERS, "    core.chunks.pin(lease.tail)\n", ""),
    Mutation(
        "empty a slab under a pin",
        ROOM,
        "if node.pins or node.state != READY or too_warm:",
        "if node.state != READY or too_warm:",
    ),
    Mutation(
        "empty a slab parents first",
        ROOM,
        "return [Victim(doomed[node], node) for node in sorted(doomed, key=lambda node: -node.depth)]",
        "return [Victim(doomed[node], node) for node in sorted(doomed, key=lambda node: node.depth)]",
    ),
    Mutation(
        "eviction in vain goes on", ROOM, "if vain_bytes < self._pool.slab_bytes:", "if vain_bytes >= 0:", unseen=True
    ),
    Mutation("empty a slab whatever hangs on it", ROOM, "VAIN_PRICE_MAX = 4\n", "VAIN_PRICE_MAX = 4000\n", unseen=True),
    Mutation(
        "empty any slab, however warm",
        ROOM,
        "if best is None or warmth < best_warmth:",
        "if best is None:",
        unseen=True,
    ),
    Mutation(
        "what lies below a chunk does not warm it",
        ROOM,
        "warmest = max(rank(node), warmest_below.get(node, 0))",
        "warmest = rank(node)",
        unseen=True,
    ),
    Mutation(
        "full although a chunk with such a slot could go",
        ROOM,
        "            doomed, more_of_size = self._coldest_of_size(slot_bytes)\n",
        "            doomed, more_of_size = None, False\n",
        unseen=True,
    ),
    Mutation(
        "a leased namespace makes room for another",
        "service/requests/caches.py",
        "{lease.space for lease in core.leases.values()} | ",
        "",
    ),
    Mutation(
        "a pinned namespace makes room for another",
        "service/requests/caches.py",
        "    held |= {hold.space for hold in core.wishes.holds.values()}\n",
        "",
    ),
    Mutation(
        "a namespace that has nothing never gets anything",
        ROOM,
        "            return stranger is not None and self._take_from_others(slot_bytes)\n",
        "            return False\n",
        unseen=True,
    ),
    Mutation("a store's pin is not counted", CHUNKS, "            self.pin(node)\n", "            node.pins += 1\n"),
    Mutation("a finished chunk keeps its pin", CHUNKS, "            self._drop_pin(node)\n", "            pass\n"),
    Mutation(
        "making room for the next chunk takes the one before",
        TRANSFERS,
        "        chunks.move_pin(space, anchor, node)\n",
        "",
    ),
    Mutation("orphan freed early", CHUNKS, "            if state > 0:\n", "            if state > 1 << 40:\n"),
    Mutation(
        "reuse a slot before its mover is reaped",
        MOVERS,
        "    core.effects.append(Ask(KillMover(mover.number)))\n",
        "    core.effects.append(Ask(KillMover(mover.number)))\n"
        "    for number in sorted(mover.jobs):\n        transfers.lost(core, core.jobs[number], why, 0)\n",
    ),
    Mutation(
        "reuse a slot when its job was cancelled",
        TRANSFERS,
        "    job.cancelled = True\n    core.instruct",
        "    job.cancelled = True\n    core.chunks.job_ended(number)\n    core.instruct",
    ),
    Mutation(
        "a mover that does not end a job is never killed",
        "service/service.py",
        'movers.kill(core, job.cache.mover, f"did not end job {number}")',
        "pass",
    ),
    Mutation(
        "a mover that does not map is never killed",
        MOVERS,
        'kill(core, core.caches[number].mover, f"did not map cache {number}")',
        "pass",
    ),
    Mutation(
        "orders to a mover that is gone",
        MOVERS,
        '    mover.state = "killed"\n    del core.movers',
        "    del core.movers",
    ),
    Mutation(
        "boards of ended sessions stay mapped",
        "service/requests/sessions.py",
        "        movers.drop_board(core, mover, session)\n",
        "        pass\n",
    ),
    Mutation(
        "a board goes with the first of its session's caches",
        MOVERS,
        "    if any(other.session is session for other in mover.caches.values()):\n        return\n",
        "",
    ),
    Mutation(
        "one job too many for a session",
        TRANSFERS,
        "if len(session.jobs) >= core.bounds.jobs_max:",
        "if len(session.jobs) > core.bounds.jobs_max:",
        unseen=True,
    ),
    # ------------------------------------------------------------ the ledger
    Mutation(
        "the last record of the ledger counts as the newest",
        RESTORE,
        "core.chunks.generation = max(core.chunks.generation, record.generation)",
        "core.chunks.generation = record.generation",
        unseen=True,
    ),
    Mutation(
        "a restored chunk that clashes keeps its other slots",
        CHUNKS,
        "                for mine in taken:\n                    self.pool.free(mine)\n",
        "",
        unseen=True,
    ),
    Mutation(
        "forget Withdraw on eviction",
        CHUNKS,
        "                self.withdrawn.append(offset)\n                self.pool.free(offset)\n        node.slots",
        "                self.pool.free(offset)\n        node.slots",
    ),
    Mutation(
        "forget Withdraw of a discarded chunk",
        CHUNKS,
        "            if state == SEALED:\n                self.withdrawn.append(offset)\n",
        "",
    ),
    Mutation(
        "a cleared chunk comes back with the next brain",
        CHUNKS,
        "            self.withdrawn.extend(offset for offset in node.slots if offset != ABSENT)\n            if node",
        "            if node",
    ),
    Mutation(
        "what was cleared is answered before it is gone from the ledger",
        "service/state/clear_notes.py",
        "    if any(space in core.chunks.emptying for space in clearing.spaces):\n",
        "    if False:\n",
    ),
    Mutation(
        "a clear does not wait for an earlier one of the same namespace",
        CHUNKS,
        "return [space for space in self.emptying if space.digest in digests]",
        "return [space for space in self.emptying if space.digest in digests][-1:]",
    ),
    Mutation(
        "what was cleared never goes on",
        "service/operators/clear_namespaces.py",
        "        core.effects.append(GoOn())\n",
        "        pass\n",
    ),
    Mutation(
        "withdraw after the order that writes",
        "service/service.py",
        "effects = [Withdraw(_pack(chunks.withdrawn)), *effects]",
        "effects = [*effects, Withdraw(_pack(chunks.withdrawn))]",
    ),
    Mutation(
        "publish after the reply that promises",
        "service/service.py",
        'effects = [Publish(b"".join(chunks.records)), *effects]',
        'effects = [*effects, Publish(b"".join(chunks.records))]',
    ),
    Mutation(
        "chunks that hold nothing are not marked",
        CHUNKS,
        "            self._mark_before(space, node)\n",
        "            pass\n",
    ),
    Mutation("only the chunk just before is marked", CHUNKS, "            at = at.parent\n\n", "            break\n\n"),
    Mutation("marks are recorded nearest first", CHUNKS, "in reversed(bare):", "in bare:"),
    Mutation(
        "a chunk is recorded before the marks that lead to it",
        CHUNKS,
        "        if not space.needed:\n"
        "            self._mark_before(space, node)\n"
        "        self.record(space, node, part, pending.slots[part])\n",
        "        self.record(space, node, part, pending.slots[part])\n"
        "        if not space.needed:\n"
        "            self._mark_before(space, node)\n",
    ),
    Mutation(
        "the mark of a chunk that went stays",
        CHUNKS,
        "self.withdrawn.append(self.marks.give_back(node))",
        "self.marks.give_back(node)",
    ),
    Mutation(
        "marks of a cleared namespace come back with the next brain",
        CHUNKS,
        "                self.withdrawn.append(self.marks.places[node])\n",
        "                pass\n",
    ),
    Mutation("restore without marks", RESTORE, "or not (present or mark != ABSENT):", "or not present:"),
    Mutation(
        "restored marks stay free",
        RESTORE,
        "core.chunks.marks.restore(_grow_trees(core, chunks))",
        "_grow_trees(core, chunks)",
    ),
    Mutation("restore ignoring generations", RESTORE, "older = min(rival, record,", "older = max(rival, record,"),
    Mutation("restore with shards missing", RESTORE, "if len(records) == len(wanted):", "if records:"),
    Mutation(
        "restore without what a prefix needs",
        RESTORE,
        "if present & space.needed != space.needed or not (",
        "if not (",
    ),
    # ------------------------------------------------------------ slots
    Mutation(
        "restore a slot and leave it free",
        "tiers/slots.py",
        "            del slab.free[position]\n",
        "            pass\n",
    ),
    Mutation(
        "an emptied slab is forgotten",
        "tiers/slots.py",
        "                if slab.index < self.slabs_ready:\n                    self._empty[slab.index] = None\n",
        "",
    ),
    Mutation(
        "pages of neighbouring blocks may overlap",
        "transfer/layout.py",
        "if run.block_stride != stride or (blocks > 1 and run.page_bytes > stride):",
        "if run.block_stride != stride:",
    ),
    Mutation(
        "a page may leave its buffer",
        "transfer/layout.py",
        "count, last_block = len(buffers), group.blocks - 1",
        "count, last_block = len(buffers), group.blocks - 2",
    ),
)

"""Deliberate bugs in the disk tier, as those of mutations.py."""

from .mutations import CHUNKS, Mutation

DISK_CHUNKS = "service/disk_chunks.py"

MUTATIONS = (
    Mutation(
        "a lookup does not say that the disks are not read",
        "service/endings.py",
        "    if tier.recovered:\n",
        "    if True:\n",
    ),
    Mutation(
        "a lookup doubts for ever",
        "service/endings.py",
        "    if tier.recovered:\n        return False\n",
        "    if tier.recovered:\n        return True\n",
    ),
    Mutation(
        "a lookup does not doubt once the namespaces are listed",
        "service/endings.py",
        "tier.found.newest.get(namespace, 0) > tier.noted.get(namespace, 0)\n",
        "False\n",
    ),
    Mutation(
        "free an extent while its write is under way",
        DISK_CHUNKS,
        "            job.extents.append(extent)\n            job.slots.append(node.slots[part])\n",
        "            job.extents.append(extent)\n            job.slots.append(node.slots[part])\n"
        "            self.extents.free(extent)\n",
    ),
    Mutation(
        "a write without a pin",
        DISK_CHUNKS,
        "        self._chunks.pin(node)\n        space.set_written(node, written=True)\n",
        "        space.set_written(node, written=True)\n",
    ),
    Mutation("keep what could not be written", "service/disk.py", "kept=not moved.faults, now_ns", "kept=True, now_ns"),
    Mutation(
        "keep what could not be read",
        "service/disk.py",
        "        wrong = {job.parts[fault.item] for fault in moved.faults}\n",
        "        wrong = set[int]()\n",
    ),
    Mutation(
        "a record that cannot be read stays in the index",
        "service/disk_reads.py",
        "    if groups and lost and core",
        "    if groups and lost and not core",
    ),
    Mutation(
        "nobody notices a disk mover that answers no note",
        "service/disk.py",
        "        tier.silent_from_ns = now_ns\n",
        "        tier.silent_from_ns = 0\n",
        unseen=True,
    ),
    Mutation(
        "a drain gives up no chunk of which DRAM lacks something",
        DISK_CHUNKS,
        "        if any(at.pins or at.state != READY for at in below):\n",
        "        if any(at.pins or at.state != READY or at.away for at in below):\n",
    ),
    Mutation(
        "what is copied above a cut has no pin",
        CHUNKS,
        "        if parent.depth:\n            self.cut_from",
        "        if parent.depth < 0:\n            self.cut_from",
    ),
    Mutation(
        "what cannot be read ends also who does not need it",
        "service/disk_reads.py",
        "        tier.chunks.lose(space, node, groups)\n        return\n",
        "        fail_all(core, tier, [node], _unreadable(), now_ns)\n"
        "        tier.chunks.lose(space, node, groups)\n        return\n",
        unseen=True,
    ),
    Mutation(
        "retrieves wait for slots of each other",
        "service/disk_reads.py",
        "        _make_way(core, tier, now_ns)\n",
        "        pass\n",
        unseen=True,
    ),
    Mutation(
        "a lease that gave way keeps its slots",
        "service/disk_reads.py",
        "    if lease is not None:\n        leases.end(core, lease)\n",
        "",
        unseen=True,
    ),
    Mutation(
        "a retrieve gives way that nobody waits for",
        "service/disk_reads.py",
        "    if len(waiting) < 2:\n        return\n",
        "",
        unseen=True,
    ),
    Mutation(
        "one good shard makes a group that was read",
        DISK_CHUNKS,
        "        bad = {space.parts[part].group for part in wrong}\n",
        "        bad = {space.parts[part].group for part in wrong if len(wrong) > 1}\n",
    ),
    Mutation(
        "extents of a parent go first",
        "index/eviction.py",
        "or disk.children or node.pins or node.state",
        "or node.pins or node.state",
    ),
    Mutation(
        "a chain is written tail first",
        "service/disk_writes.py",
        "dict.fromkeys(reversed(chain), ",
        "dict.fromkeys(chain, ",
        unseen=True,
    ),
    Mutation(
        "a child is written whose parent is not",
        "service/disk_writes.py",
        "if _is_wanted(core, space, node) and _parent_claims(node):",
        "if _is_wanted(core, space, node):",
        unseen=True,
    ),
    Mutation(
        "the budget is not charged",
        "tiers/placement.py",
        "            self._bytes -= count\n",
        "            pass\n",
    ),
    Mutation(
        "what is queued is not counted", "tiers/placement.py", "        self.queued_bytes += count\n", "        pass\n"
    ),
    Mutation(
        "every write has the same generation",
        "service/disk_writes.py",
        "generation = core.chunks.generation = core.chunks.generation + 1",
        "generation = 1",
    ),
    Mutation(
        "another device is read than was written",
        DISK_CHUNKS,
        "                    device=place.device,\n",
        "                    device=0 if job.kind == 'read' else place.device,\n",
    ),
    Mutation(
        "a retrieve does not wait for its chunks",
        "service/transfers.py",
        "            if not node.in_dram & bit:\n",
        "            if not node.present & bit:\n",
    ),
    Mutation(
        "nobody who waits is told that the disk mover is gone",
        "service/disk.py",
        "    disk_reads.fail_all(core, tier, tier.waiters, disk_reads.mover_lost(), now_ns)\n",
        "    pass\n",
        unseen=True,
    ),
    Mutation(
        "slots of a read are free before its mover is reaped",
        "service/disk.py",
        'movers.kill(core, tier.mover, f"did not end disk job {number}")\n',
        'movers.kill(core, tier.mover, f"did not end disk job {number}")\n    gone(core, tier, now_ns)\n',
    ),
    Mutation(
        "leaving DRAM forgets what is on disk",
        CHUNKS,
        "if node.disk is None or not node.disk.keeps:",
        "if node.disk is None or not node.disk.keeps or node.children is None:",
        unseen=True,
    ),
    Mutation(
        "a cleared namespace is not void on disk",
        "service/recovery.py",
        "if generation > void and",
        "if generation and",
    ),
    Mutation(
        "cleared before the devices know it",
        "service/disk.py",
        "    if tier is None or not known:\n",
        "    if tier is None or not known or known:\n",
    ),
    Mutation("recover groups with shards missing", "service/recovery.py", "len(whole) == len(parts)", "whole"),
    Mutation(
        "write before everything on disk is known",
        "service/disk.py",
        "    if tier.recovered:\n        disk_writes.choose",
        "    if True:\n        disk_writes.choose",
    ),
    Mutation(
        "a chunk that moves keeps its old extents",
        DISK_CHUNKS,
        "                if extents[part] != ABSENT:\n                    self.extents.free(extents[part])\n",
        "",
    ),
    Mutation(
        "a device that is drained takes writes",
        "service/state.py",
        "= not problem and device not in self.drains",
        "= not problem",
    ),
    Mutation(
        "a device is erased before it is empty",
        "service/disk_drain.py",
        "    if not pool.bytes_used:\n",
        "    if True:\n",
    ),
    Mutation(
        "the order of its old device keeps a chunk that moved",
        "index/eviction.py",
        "        if node.disk.ordered_at != self._device:\n            node.disk.ordered_at = self._device\n",
        "        if False:\n",
    ),
    Mutation(
        "the note of a namespace in the index is forgotten",
        "service/disk.py",
        "core.chunks.spaces.keys() | tier.cleared.keys()",
        "tier.cleared.keys()",
        unseen=True,
    ),
    Mutation(
        "the newest generation hides one that is whole",
        "service/recovery.py",
        "key=lambda chunk: (chunk[2].bit_count(), chunk[4])",
        "key=lambda chunk: chunk[4]",
    ),
    Mutation(
        "what is forgotten is not void",
        "service/disk.py",
        "ForgetNotes(old, core.chunks.generation)",
        "ForgetNotes(old, 0)",
        unseen=True,
    ),
    Mutation(
        "what was forgotten is back with the next record",
        "service/disk_writes.py",
        "tier.noted.setdefault(space.digest, job.generation - 1)",
        "tier.noted.setdefault(space.digest, 0)",
        unseen=True,
    ),
)

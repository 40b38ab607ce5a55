"""Deliberate bugs in what operators command, as those of mutations.py."""

from .mutations import CHUNKS, Mutation

HOLDS, ADMISSION, DISK_READS = "service/requests/holds.py", "service/requests/admission.py", "service/disk/reads.py"
RECOVERY, PREFIXES, DRAIN = (
    "service/disk/recovery.py",
    "service/operators/clear_prefix.py",
    "service/operators/server_drain.py",
)
KV_EVENTS, DISK, CLEARS = (
    "service/requests/kv_events.py",
    "service/disk/mover.py",
    "service/operators/clear_namespaces.py",
)

MUTATIONS = (
    Mutation("a hold without a pin", HOLDS, "    core.chunks.pin(tail)\n", ""),
    Mutation("a hold that is over keeps its pin", HOLDS, "    core.chunks.unpin(hold.space, hold.tail)\n", ""),
    Mutation("a hold without a timer", HOLDS, '    core.timers.set(hold.expires_ns, "hold", hold.number)\n', ""),
    Mutation("holds of any number", HOLDS, "if len(wishes.holds) >= bounds.holds_max:", "if bounds.holds_max < 0:"),
    Mutation("holds of all of DRAM", HOLDS, "    if held_bytes > most_bytes:\n", "    if held_bytes < 0:\n"),
    Mutation("a chunk under two holds counts once too little", HOLDS, "if count > 1:", "if count > 2:"),
    Mutation("a warm that has all goes on", HOLDS, '    if hold.kind == "warm":\n', '    if hold.kind == "":\n'),
    Mutation(
        "a hold lives on when its chunks are lost",
        DISK_READS,
        "        holds.end(core, hold, error.message)\n",
        "        pass\n",
    ),
    Mutation(
        "a hold lives on in a cleared namespace",
        CLEARS,
        '        holds.end(core, hold, "its namespace was cleared")\n',
        "        pass\n",
    ),
    Mutation(
        "a cleared prefix keeps its leases",
        PREFIXES,
        "    reads.end_below(core, space, gone, cleared, now_ns)\n",
        "",
    ),
    Mutation(
        "a cleared prefix goes without what continues it",
        PREFIXES,
        "    doomed = space.subtree(node)\n",
        "    doomed = [node]\n",
    ),
    Mutation(
        "a cleared prefix is not noted",
        PREFIXES,
        "    if noted and tier is not None:\n",
        "    if chunks < 0 and tier:\n",
    ),
    Mutation(
        "a cleared prefix is served until the next brain",
        PREFIXES,
        '    rest = core.chunks.cut(space, node, "cleared")\n',
        "    rest = None\n",
    ),
    Mutation(
        "marks of a cleared prefix come back with the next brain",
        CHUNKS,
        "            if at in self.marks:\n                self.withdrawn.append(self.marks.give_back(at))\n"
        "        space.cut",
        "        space.cut",
    ),
    Mutation(
        "notes of prefixes are not heeded",
        RECOVERY,
        "return generation <= max(floor, cleared.get(key, 0))",
        "return False",
    ),
    Mutation(
        "what hung on a cleared prefix comes back when that is stored again",
        RECOVERY,
        "return generation <= max(floor, cleared.get(key, 0))",
        "return generation <= cleared.get(key, 0)",
    ),
    Mutation(
        "a later brain writes notes of prefixes without what they say",
        RECOVERY,
        "                tier.cleared[namespace] = prefix\n",
        "                pass\n",
    ),
    Mutation(
        "a tenant is cleared only as far as its caches know",
        RECOVERY,
        "            space.tags.add(chunk[5])\n",
        "",
    ),
    Mutation(
        "a tenant is cleared only as far as its caches know, after the brain has died",
        CHUNKS,
        "        space.tags.add(tenant)\n",
        "",
    ),
    Mutation(
        "what has no place in the index stays a tenant's",
        CLEARS,
        "for table in (tags, left_out) for",
        "for table in (tags,) for",
        unseen=True,
    ),
    Mutation(
        "a clear of a tenant is answered with its first note",
        "service/state/clear_notes.py",
        "            if not clearing.left:\n",
        "            if True:\n",
        unseen=True,
    ),
    Mutation(
        "a tenant is promised what lies on a device that is away",
        CLEARS,
        "    if tier is not None and not tier.all_known:\n",
        "    if False:\n",
        unseen=True,
    ),
    Mutation(
        "a note of a prefix is forgotten as one of a namespace is",
        "service/state/clear_notes.py",
        "core.chunks.spaces.keys() | tier.cleared.keys()",
        "core.chunks.spaces.keys()",
        unseen=True,
    ),
    Mutation(
        "notes of prefixes push out those of namespaces",
        "service/state/clear_notes.py",
        "len(tier.noted) - len(tier.cleared)",
        "len(tier.noted)",
        unseen=True,
    ),
    Mutation(
        "notes of prefixes go while their namespace lives",
        PREFIXES,
        "tier.noted.get(prefix.namespace, void) >= void",
        "void > 0",
        unseen=True,
    ),
    Mutation(
        "notes of prefixes go before it is durable that their namespace was cleared",
        PREFIXES,
        "prefix.namespace not in tier.unnoted and ",
        "",
        unseen=True,
    ),
    Mutation(
        "a prefix is not noted for a device that is away",
        PREFIXES,
        "prefix.namespace in tier.noted or not tier.all_known",
        "prefix.namespace in tier.noted",
        unseen=True,
    ),
    Mutation(
        "what operators want read holds up retrieves",
        DISK_READS,
        "    if waiting and wishes:\n",
        "    if not waiting and wishes:\n",
        unseen=True,
    ),
    Mutation(
        "stores while the server is drained",
        ADMISSION,
        "    if core.wishes.drain:\n",
        '    if core.wishes.drain == "":\n',
    ),
    Mutation(
        "stores right after the weights have changed",
        ADMISSION,
        "if until_ns is not None and now_ns < until_ns:",
        "if until_ns is not None and now_ns < 0:",
    ),
    Mutation(
        "a second change of weights opens the namespace sooner",
        ADMISSION,
        "max(until_ns, core.wishes.fences.get(namespace, 0))",
        "until_ns",
    ),
    Mutation(
        "drained before stores have ended", DRAIN, "    if core.chunks.pendings or any(", "    if any(", unseen=True
    ),
    Mutation(
        "drained while something is leased",
        DRAIN,
        'return "leases" if core.chunks.pins and',
        'return "leases" if not core.chunks and',
        unseen=True,
    ),
    Mutation(
        "draining writes nothing", "service/disk/writes.py", "or core.wishes.drain or (core", "or (core", unseen=True
    ),
    Mutation(
        "a drain keeps its holds",
        DRAIN,
        "        for hold in list(core.wishes.holds.values()):\n",
        "        for hold in ():\n",
        unseen=True,
    ),
    # ------------------------------------------------------------ what subscribers are told
    Mutation(
        "subscribers are not told of a namespace that goes with its last cache",
        "service/requests/movers.py",
        "            kv_events.cleared(core, space)  # its last chunk may have gone in this event\n",
        "",
    ),
    Mutation(
        "subscribers are not told of a clear",
        CLEARS,
        "    kv_events.cleared(core, space)\n",
        "",
    ),
    Mutation(
        "subscribers are not told what was found on disk",
        "service/holdings/disk_chunks.py",
        "            self._chunks.changes[node] = space, 0, 0\n",
        "            pass\n",
    ),
    Mutation(
        "subscribers are not told what an earlier brain left",
        KV_EVENTS,
        "        core.untold.append((space, space.subtree(space.root)[:0:-1]))\n",
        "        pass\n",
    ),
    Mutation(
        "subscribers are told that a chunk is stored with a part of it",
        KV_EVENTS,
        "return groups != 0 and groups & space.needed == space.needed",
        "return groups != 0",
        unseen=True,
    ),
    Mutation(
        "nobody knows whose the namespaces were that have left the index",
        "service/requests/namespaces.py",
        "core.disk.left_out[space.digest] = space.tags",
        "pass",
    ),
    Mutation(
        "a chunk that leaves is not told",
        KV_EVENTS,
        "        here = _is_here(core, space, node)\n",
        "        here = True\n",
    ),
    Mutation(
        "chunks are told as one chain that are none",
        KV_EVENTS,
        "if known == tier and keys[-1] == node.parent.key:",
        "if known == tier:",
    ),
)

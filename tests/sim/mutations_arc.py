"""Deliberate bugs in ARC. What it keeps is no promise of the server's, so they show in its bookkeeping, or in the unit
tests, which hold it against the paper."""

from .mutations import CHUNKS, LEASES, ROOM, Mutation

ARC = "index/arc.py"

MUTATIONS = (
    Mutation(
        "a chunk that is frequent alone",
        ARC,
        "            at = at.parent\n        if evict",
        "            break\n        if evict",
    ),
    Mutation(
        "a chunk that was found is offered to nobody",
        ARC,
        "        if evictable(tail):\n            self.orders[space].offer(tail)\n",
        "",
    ),
    Mutation(
        "what was found is counted twice",
        ARC,
        "            self.recent.held_bytes -= held_bytes\n",
        "",
    ),
    Mutation(
        "what a lookup found stays recent",
        LEASES,
        "        core.chunks.arc.asked(space, tail)\n",
        "        pass\n",
        unseen=True,
    ),
    Mutation(
        "a cleared namespace keeps its ghosts", ROOM, "        self._policy.drop_space(space)\n", "        pass\n"
    ),
    Mutation(
        "ghosts that go with their namespace are counted on",
        ARC,
        "            half.ghosts -= len(ghosts)\n",
        "",
    ),
    Mutation(
        "a chunk that comes back is still a ghost",
        ARC,
        "                self._forget(half, ghosts, node.key)\n",
        "",
    ),
    Mutation(
        "a store does not look for ghosts", CHUNKS, "            self.arc.comes(space, node)\n", "            pass\n"
    ),
    Mutation("ghosts without a bound", ARC, "        self._serial += 1\n", "        self.ghosts_max += 1\n"),
    Mutation(
        "the recent half may remember two arenas",
        ARC,
        "while recent.ghosts and recent.held_bytes + recent.ghost_bytes > most:",
        "while recent.ghosts and recent.ghost_bytes > most:",
    ),
    Mutation(
        "all together may remember more than two arenas",
        ARC,
        "held_bytes + recent.ghost_bytes + frequent.ghost_bytes > 2 * most",
        "recent.ghost_bytes + frequent.ghost_bytes > 2 * most",
    ),
    Mutation(
        "more keys than the index holds",
        ARC,
        "        while recent.ghosts + frequent.ghosts > self.ghosts_max:\n",
        "        while recent.ghosts > self.ghosts_max:\n",
    ),
    Mutation(
        "a target beyond the arena",
        ARC,
        "min(self.capacity_bytes, self.target_bytes + step)",
        "self.target_bytes + step",
    ),
    Mutation("a target below nothing", ARC, "max(0, self.target_bytes - step)", "self.target_bytes - step"),
    Mutation(
        "the youngest ghost is forgotten first",
        ARC,
        "        self._forget(half, ghosts, next(iter(ghosts)))\n",
        "        self._forget(half, ghosts, next(reversed(ghosts)))\n",
        unseen=True,
    ),
    Mutation(
        "ghosts learn the wrong way",
        ARC,
        "        if half is self.recent:\n            self.target",
        "        if half is self.frequent:\n            self.target",
        unseen=True,
    ),
    Mutation(
        "the half that is within its target gives",
        ARC,
        "self.recent.held_bytes > self.target_bytes",
        "self.recent.held_bytes <= self.target_bytes",
        unseen=True,
    ),
    Mutation(
        "a chunk leaves no ghost",
        ROOM,
        "            self._arc.evicted(space, node, freed_bytes)\n",
        "            pass\n",
    ),
    Mutation(
        "a ghost of the other half",
        ARC,
        "        order.ghosts[half][node.key] =",
        "        order.ghosts[self.recent][node.key] =",
    ),
    Mutation(
        "an order that nothing is taken from grows",
        ARC,
        "        if len(self._heap) > self._tidy_at:\n",
        "        if False:\n",
        unseen=True,
    ),
    Mutation(
        "a tidied order forgets who may go",
        ARC,
        "self._heap = [entry for entry in self._heap if self._may_go(entry[2])]",
        "self._heap = []",
        unseen=True,
    ),
    Mutation(
        "a restored chunk is in no half",
        CHUNKS,
        "        space.put_in_dram(node, present)\n        self.count(space, node, 1)\n",
        "        space.put_in_dram(node, present)\n",
    ),
    Mutation(
        "a slab of another size is taken from what was found again",
        ROOM,
        "if stranger is not None and rank(stranger.node) < rank(victim.node):",
        "if stranger is not None and stranger.node.used < victim.node.used:",
        unseen=True,
    ),
)

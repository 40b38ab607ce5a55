"""Deliberate bugs in what tenants are promised."""

from .mutations import Mutation

ACCOUNTS, CACHES, LEASES, ROOM = (f"service/{name}.py" for name in ("accounts", "caches", "leases", "room"))

MUTATIONS = (
    Mutation(
        "a tenant without room in DRAM holds up the reads of all",
        "service/disk_reads.py",
        "    return bool(tier.starved) and _account(core, space) in tier.starved\n",
        "    return bool(tier.starved)\n",
        unseen=True,
    ),
    Mutation(
        "who waits for its disk gives way to who waits for slots",
        "service/disk_reads.py",
        "        if job.held is not None and _waits(core, tier, job.space):\n",
        "        if job.held is not None:\n",
        unseen=True,
    ),
    Mutation("a tenant beyond its maximum", ACCOUNTS, "self.taken_bytes + more_bytes - self.max_bytes", "0"),
    Mutation(
        "a maximum that does not count what is being stored",
        ACCOUNTS,
        "self.taken_bytes + more_bytes - self.max_bytes",
        "self.held_bytes + more_bytes - self.max_bytes",
    ),
    Mutation(
        "a guarantee that does not hold", ACCOUNTS, "max(0, self.held_bytes - self.guaranteed_bytes)", "self.held_bytes"
    ),
    Mutation(
        "a guarantee that what is being stored eats up",
        ACCOUNTS,
        "max(0, self.held_bytes - self.guaranteed_bytes)",
        "max(0, self.taken_bytes - self.guaranteed_bytes)",
    ),
    Mutation(
        "a slot that is never refunded",
        ACCOUNTS,
        "        self._charge(self.owner(offset), -self.slot_bytes(offset))\n",
        "",
    ),
    Mutation(
        "a slot that stays reserved",
        ACCOUNTS,
        "        self._charge(self.owner(offset), -slot_bytes)\n        super().hand_over(offset, owner)\n"
        "        self._charge(owner, slot_bytes)\n",
        "        super().hand_over(offset, owner)\n",
    ),
    Mutation(
        "a restored slot that nobody is charged for",
        ACCOUNTS,
        "        if taken:\n            self._charge(owner, slot_bytes)\n",
        "",
    ),
    Mutation(
        "one chunk of a slab at a time is held against a guarantee",
        ACCOUNTS,
        "            planned[owner] = bytes_gone\n",
        "            planned[owner] = 0\n",
        unseen=True,
    ),
    Mutation("a slab is emptied below a guarantee", ROOM, "self._claim.allows(space, node, planned)", "True"),
    Mutation(
        "the index evicts below a guarantee",
        ROOM,
        "for victim in self._may_go() if victim.node.children is None",
        "for victim in self._leaves() if victim.node.children is None",
    ),
    Mutation(
        "its own chunks go before those of others, below its guarantee",
        ACCOUNTS,
        "self.own = account.taken_bytes + more_bytes > account.guaranteed_bytes",
        "self.own = True",
        unseen=True,
    ),
    Mutation(
        "its own chunks never go below its guarantee",
        ROOM,
        "if offset is None and not claim.own:",
        "if False:",
        unseen=True,
    ),
    Mutation("a tenant registers for the namespace of another", ACCOUNTS, "return unused or", "return True or"),
    Mutation("a tenant finds what another has", LEASES, "in session.engine.accounts", "is not None"),
    Mutation(
        "a namespace is forgotten below a guarantee",
        CACHES,
        "return held_bytes <= account.spare_bytes -",
        "return held_bytes >= 0 *",
        unseen=True,
    ),
    Mutation(
        "a namespace is forgotten while its tenant's guarantee is being stored",
        CACHES,
        "if account.guaranteed_bytes and any(",
        "if account.guaranteed_bytes < 0 and any(",
        unseen=True,
    ),
)

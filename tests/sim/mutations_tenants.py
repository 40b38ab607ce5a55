"""Deliberate bugs in what tenants are promised."""

from .mutations import CHUNKS, Mutation

ACCOUNTS, CACHES, DISK_ROOM, LEASES, ROOM = (
    *("service/holdings/accounts.py", "service/requests/caches.py", "service/holdings/disk_eviction.py"),
    *("service/requests/lookup.py", "service/holdings/eviction.py"),
)

MUTATIONS = (
    Mutation(
        "a tenant without room in DRAM holds up the reads of all",
        "service/disk/reads.py",
        "    return bool(tier.starved) and _account(core, space) in tier.starved\n",
        "    return bool(tier.starved)\n",
        unseen=True,
    ),
    Mutation(
        "who waits for its disk gives way to who waits for slots",
        "service/disk/reads.py",
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
        "            planned.update(going)\n",
        "            pass\n",
        unseen=True,
    ),
    Mutation("a slab is emptied below a guarantee", ROOM, "self._claim.allows(space, node, planned)", "True"),
    Mutation(
        "the index evicts below a guarantee",
        ROOM,
        "            victims = [victim for victim in victims if claim.allows(*victim, index=True)]\n",
        "",
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
        "what leaves DRAM is counted for its namespace on",
        CHUNKS,
        "        node.slots = ()\n        space.put_in_dram(node, 0)\n",
        "        node.slots = ()\n        node.in_dram = 0\n",
    ),
    Mutation(
        "a namespace is forgotten below a guarantee",
        ACCOUNTS,
        "return self.held_bytes(space) <= account.spare_bytes -",
        "return self.held_bytes(space) >= 0 *",
        unseen=True,
    ),
    Mutation(
        "a namespace is forgotten while its tenant's guarantee is being stored",
        CACHES,
        "if account.guaranteed_bytes and any(",
        "if account.guaranteed_bytes < 0 and any(",
        unseen=True,
    ),
    Mutation(
        "a tenant beyond its maximum on disk", DISK_ROOM, "if self._fit_quota(claim.account, wanted):", "if True:"
    ),
    Mutation(
        "at its maximum on disk what was used later goes",
        DISK_ROOM,
        "            if own is None or own[1].used >= wanted.used:\n                break\n",
        "            if own is None:\n                break\n",
        unseen=True,
    ),
    Mutation("a guarantee on disk that does not hold", DISK_ROOM, " and claim.allows(space, node, planned)", ""),
    Mutation(
        "one chunk of a segment at a time is held against a guarantee",
        DISK_ROOM,
        "not wanted.lets_go(space, node, planned)",
        "not wanted.lets_go(space, node)",
        unseen=True,
    ),
    Mutation(
        "what is warm stays with who has more on disk than its guarantee",
        DISK_ROOM,
        "return (node.used < self.used or not claim.own) and",
        "return node.used < self.used and",
        unseen=True,
    ),
    Mutation(
        "its own chunks on disk never go below its guarantee",
        DISK_ROOM,
        "if extent is None and not claim.own:",
        "if False:",
        unseen=True,
    ),
    Mutation(
        "room in the index takes from disk below a guarantee",
        DISK_ROOM,
        "            if claim is None or claim.allows(space, node)\n",
        "",
    ),
    Mutation(
        "room in the index takes what lies in DRAM below a guarantee",
        DISK_ROOM,
        "is not None and not node.in_dram and node.children is None",
        "is not None and node.away and node.children is None",
    ),
    Mutation(
        "room in the index takes out of DRAM what stays on disk",
        ROOM,
        "if claim.allows(*victim, index=True)]",
        "if claim.allows(*victim)]",
        unseen=True,
    ),
    Mutation(
        "room on disk takes what lies in DRAM below a guarantee",
        ACCOUNTS,
        "(index or other & space.needed != space.needed)",
        "index",
        unseen=True,
    ),
    Mutation(
        "a maximum on disk that was lowered stays exceeded",
        DISK_ROOM,
        "if account.lacks(0) else None",
        "if account.lacks(0) < 0 else None",
    ),
    Mutation(
        "extents that nobody is charged for",
        "service/holdings/disk_chunks.py",
        "pool_of=SlotPool if disk_accounts is None else",
        "pool_of=SlotPool if True else",
    ),
    Mutation(
        "a namespace is forgotten below a guarantee on disk",
        CACHES,
        "tiers = (accounts, disk_accounts) if disk_accounts is not None else (accounts,)",
        "tiers = (accounts,)",
        unseen=True,
    ),
    Mutation(
        "a namespace is forgotten before it is known what is guaranteed of it",
        CACHES,
        "not core.disk.recovered and disk_accounts.guarantee:",
        "not core.disk.recovered and False:",
        unseen=True,
    ),
    Mutation(
        "a tenant without room on disk holds up the writes of all",
        "service/disk/writes.py",
        'is_tenants_own = blocked == "room" and',
        "is_tenants_own = not blocked and",
        unseen=True,
    ),
    Mutation(
        "a chunk larger than its tenant's maximum pushes its others out",
        "service/holdings/disk_chunks.py",
        "        if self.accounts is None or space.tenant is None:\n",
        "        if space.needed:\n",
        unseen=True,
    ),
    Mutation(
        "what never fits into DRAM for its tenant is offered from disk",
        LEASES,
        "disk_waits.may_ever_fit(core, space, away) and ",
        "",
        unseen=True,
    ),
    Mutation(
        "a tenant registers that may not have a chunk",
        CACHES,
        "if account.max_bytes and chunk_bytes > account.max_bytes:",
        "if account.max_bytes < 0:",
        unseen=True,
    ),
)

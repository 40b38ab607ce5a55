"""Deliberate bugs, of a line or two each. A seed or a unit test must notice every one."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A bug: `old` occurs exactly once in `file` (below client/kvclient/) and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


OFFLOAD, LOOKUPS = "offload/decide.py", "offload/lookups.py"
RANGES, REQUEST = "offload/ranges.py", "offload/request.py"

MUTATIONS = (
    # ------------------------------------------------------------ what is retrieved
    Mutation(
        "no token is left to compute",
        RANGES,
        "return tokens if options.engine_steps_back else tokens - 1",
        "return tokens",
    ),
    Mutation(
        "a window or a state serves one token less as well",
        RANGES,
        "    if not options.is_plain:\n        return (tokens - 1)",
        "    if False:\n        return (tokens - 1)",
    ),
    Mutation(
        "the boundary at the last token is asked for",
        RANGES,
        "(tokens if options.is_plain else tokens - 1) // options",
        "tokens // options",
    ),
    Mutation(
        "a retrieve begins one block early",
        RANGES,
        "            return hbm_tokens\n",
        "            return max(0, hbm_tokens - group.block_tokens)\n",
    ),
    Mutation(
        "a retrieve writes the engine's own prefix",
        RANGES,
        "            return hbm_tokens\n",
        "            return 0\n",
    ),
    Mutation(
        "a window reaches into the engine's own prefix",
        RANGES,
        "return max(hbm_tokens, end_tokens - group.window_tokens)",
        "return max(0, end_tokens - group.window_tokens)",
    ),
    Mutation(
        "a window is a token short",
        RANGES,
        "return max(hbm_tokens, end_tokens - group.window_tokens)",
        "return max(hbm_tokens, end_tokens - group.window_tokens + 1)",
    ),
    Mutation(
        "the state of the chunk before",
        RANGES,
        "return end_tokens - group.block_tokens",
        "return max(0, end_tokens - 2 * group.block_tokens)",
    ),
    Mutation(
        "the last block is left out when it is used in part",
        RANGES,
        "last = -(-end_tokens // group.block_tokens)",
        "last = end_tokens // group.block_tokens",
    ),
    Mutation(
        "a prefix that ends inside a block is built upon",
        RANGES,
        'return all(hbm_tokens % group.block_tokens == 0 for group in options.groups if group.kind != "state")',
        "return True",
    ),
    Mutation("the null block is written", RANGES, '            return (), "null-block"\n', "            pass\n"),
    Mutation(
        "the threshold is ignored",
        OFFLOAD,
        "        if gain >= self._options.gain_min and is_aligned",
        "        if gain > 0 and is_aligned",
    ),
    Mutation(
        "what the engine holds is offered as well",
        OFFLOAD,
        "gain = min(found_tokens, usable_tokens(self._options, it.tokens)) - hbm_tokens",
        "gain = min(found_tokens, usable_tokens(self._options, it.tokens))",
    ),
    Mutation(
        "retrieves are not bounded",
        OFFLOAD,
        "if len(self._retrieves) < self._options.retrieves_max:",
        "if True:",
    ),
    Mutation(
        "a request that must compute itself retrieves",
        OFFLOAD,
        "reads=reads and self._options.retrieves",
        "reads=True",
    ),
    Mutation(
        "output is resumed by an engine that cannot",
        OFFLOAD,
        "may_read = it.reads and (self._options.resumes_output or tokens <= it.prompt_tokens)",
        "may_read = it.reads",
    ),
    # ------------------------------------------------------------ waiting
    Mutation("a late answer is waited for", LOOKUPS, "if it.lookup is None or now_s < it.lookup.due_s:", "if True:"),
    Mutation(
        "an answer grows old before it is used",
        REQUEST,
        "now_s + options.moment_s\n            return True\n",
        "now_s + options.moment_s\n            return False\n",
    ),
    Mutation(
        "an answer is believed for ever",
        REQUEST,
        "        return now_s < self.believed_until_s\n",
        "        return True\n",
    ),
    Mutation(
        "a lease is used when it has ended",
        REQUEST,
        "now_s < self.lease.expires_monotonic_s - options.lease_spare_s",
        "True",
    ),
    Mutation(
        "a request waits for its turn for ever",
        OFFLOAD,
        "if now_s - it.queued_s < self._options.retrieve_wait_s:",
        "if True:",
    ),
    Mutation(
        "an answer is taken for that of an earlier lookup",
        LOOKUPS,
        "it.lookup is not None and it.lookup.number == number else None",
        "it.lookup is not None else None",
    ),
    # ------------------------------------------------------------ ahead of time
    Mutation(
        "everybody is asked for ahead of time",
        OFFLOAD,
        "not self._unavailable and len(self._ahead) < self._options.ahead_max",
        "not self._unavailable",
    ),
    Mutation(
        "an answer that nobody waited for stays fresh",
        LOOKUPS,
        "lookup.asked_s + self._options.moment_s if lookup.is_ahead else None",
        "None",
    ),
    Mutation(
        "an answer that was waited for is old when it comes",
        OFFLOAD,
        "                it.lookup = it.lookup._replace(is_ahead=False)\n",
        "                pass\n",
    ),
    Mutation(
        "a request is asked for twice",
        OFFLOAD,
        "it = self._unasked.pop(request, None)\n        if it is not None:\n            self._lookups",
        "it = self._unasked.get(request)\n        if it is not None:\n            self._lookups",
    ),
    Mutation(
        "who was aborted is ahead for ever",
        OFFLOAD,
        "        if it is None:\n            return\n        self._forget_ahead(request)\n",
        "        if it is None:\n            return\n",
    ),
    Mutation(
        "who has no lease is ahead for ever",
        OFFLOAD,
        "            self._ahead.discard(it.name)\n",
        "            pass\n",
    ),
    # ------------------------------------------------------------ leases
    Mutation(
        "a failed retrieve keeps its lease",
        OFFLOAD,
        "            self._lookups.release(order.lease)  # some rank may not have used it\n",
        "",
    ),
    Mutation(
        "a lease that is not needed is kept",
        LOOKUPS,
        "        if lookup is None or it.phase is not Phase.WAITING:\n            self.release(found.lease)\n",
        "        if lookup is None or it.phase is not Phase.WAITING:\n",
    ),
    Mutation(
        "the lease before is forgotten",
        LOOKUPS,
        "        if it.answer is not None:\n            self.release(it.answer.lease)\n",
        "",
    ),
    Mutation(
        "an aborted request keeps its lease",
        OFFLOAD,
        "        self._lookups.set_answer(it, None)\n        it.phase, it.retrieve = Phase.FINISHED, 0\n",
        "        it.phase, it.retrieve = Phase.FINISHED, 0\n",
    ),
    Mutation(
        "a declined retrieve keeps its lease",
        OFFLOAD,
        "        self._lookups.set_answer(it, None)\n        it.phase = Phase.RUNNING\n",
        "        it.answer = None\n        it.phase = Phase.RUNNING\n",
    ),
    Mutation(
        "the lease of a retrieve is given back at its begin",
        OFFLOAD,
        "        it.answer = None  # its lease is the job's now\n",
        "        self._lookups.set_answer(it, None)\n",
    ),
    Mutation(
        "leases of a server that was only late are kept",
        LOOKUPS,
        "lease is not None:\n                self.set_answer(it, None)\n",
        "lease is not None:\n                it.answer = None\n",
    ),
    # ------------------------------------------------------------ failure
    Mutation(
        "a failed request asks again", OFFLOAD, "        it.is_barred, it.why = True, why\n", "        it.why = why\n"
    ),
    Mutation(
        "the frontier stays when a retrieve has failed",
        OFFLOAD,
        'it.frontier, it.stopped, it.held_for_sure = order.hbm_tokens // self._options.chunk_tokens, "", None',
        'it.stopped, it.held_for_sure = "", None',
    ),
    Mutation(
        "the frontier goes back when a retrieve has succeeded",
        OFFLOAD,
        "it.disk_tokens += order.disk_tokens\n            return\n",
        "it.disk_tokens += order.disk_tokens\n            it.frontier = 0\n            return\n",
    ),
    Mutation(
        "a late retrieve wakes another life of the request",
        OFFLOAD,
        "        if it.retrieve == job:\n",
        "        if it.phase is Phase.RETRIEVING:\n",
    ),
    Mutation(
        "a finished request is woken",
        OFFLOAD,
        "it.phase, it.retrieve = Phase.FINISHED, 0",
        "it.phase = Phase.FINISHED",
    ),
    # ------------------------------------------------------------ ranks
    Mutation("the first rank ends a job", REQUEST, "        if entry.ranks_left:\n            return None\n", ""),
    Mutation(
        "a report counts twice",
        REQUEST,
        "if entry is None or rank not in entry.ranks_left:",
        "if entry is None:",
    ),
    Mutation("the last rank's word is the job's", REQUEST, "entry.why = entry.why or why", "entry.why = why"),
    Mutation(
        "the luckiest rank's count is the job's", REQUEST, "min(entry.chunks, chunks)", "max(entry.chunks, chunks)"
    ),
    # ------------------------------------------------------------ stores
    Mutation(
        "what was found is stored again",
        LOOKUPS,
        "max(found.chunks, it.storing_until, it.stored_until)",
        "max(it.storing_until, it.stored_until)",
    ),
    Mutation(
        "what is on its way is stored again",
        LOOKUPS,
        "max(found.chunks, it.storing_until, it.stored_until)",
        "max(found.chunks, it.stored_until)",
    ),
    Mutation(
        "what was stored meanwhile is stored again",
        LOOKUPS,
        "max(found.chunks, it.storing_until, it.stored_until)",
        "max(found.chunks, it.storing_until)",
    ),
    Mutation(
        "a late answer does not count",
        LOOKUPS,
        "            it.frontier = max(it.frontier, found.chunks)\n",
        "            pass\n",
    ),
    Mutation(
        "stored before the answer",
        OFFLOAD,
        "        if it.lookup is not None and not self._lookups.gave_up(it, now_s):\n            return False",
        "        if False:\n            return False",
    ),
    Mutation(
        "a chunk is stored before it is computed",
        OFFLOAD,
        "it.due = min(tokens // self._options.chunk_tokens, it.chunks)",
        "it.due = min(-(-tokens // self._options.chunk_tokens), it.chunks)",
    ),
    Mutation(
        "stores are not bounded",
        OFFLOAD,
        "return len(self._stores) < self._options.stores_max and self._chunks",
        "return self._chunks",
    ),
    Mutation(
        "chunks in flight are not given back",
        OFFLOAD,
        "        self._chunks_storing -= asked\n",
        "",
    ),
    Mutation(
        "chunks in flight are not bounded",
        OFFLOAD,
        "end_chunk=min(it.due, first + room)",
        "end_chunk=it.due",
    ),
    Mutation(
        "stored behind a gap",
        OFFLOAD,
        '                it.stopped = ended.why or "short"\n',
        "                pass\n",
    ),
    Mutation(
        "stopped by what somebody else brings",
        OFFLOAD,
        "ended.why not in CHAIN_GOES_ON and held_until",
        "held_until",
    ),
    Mutation(
        "a gap is never forgotten",
        LOOKUPS,
        'it.frontier, it.stopped, it.held_for_sure = held, "", None',
        "it.frontier, it.held_for_sure = held, None",
    ),
    Mutation(
        "the wrong parent",
        REQUEST,
        "return self.key_range(chunk - 1, chunk) if chunk",
        "return self.key_range(chunk, chunk + 1) if chunk",
    ),
    Mutation(
        "a hole is stored as if it were held",
        RANGES,
        "held = ids.index(options.null_block) if _has_null(ids, options.null_block) else len(ids)",
        "held = len(ids)",
    ),
    Mutation(
        "part of a window's chunk is stored",
        RANGES,
        "    return behind // per_chunk\n",
        "    return -(-behind // per_chunk)\n",
    ),
    Mutation(
        "stored while it is retrieved",
        OFFLOAD,
        "            if it.phase is Phase.RETRIEVING:\n                return False\n            self.admitted",
        "            self.admitted",
    ),
    # ------------------------------------------------------------ ends
    Mutation(
        "blocks are let go while a store reads them",
        OFFLOAD,
        "return self._stores.are_of(request) or self._retrieves.are_of(request)",
        "return self._retrieves.are_of(request)",
    ),
    Mutation(
        "an idle engine does not poll for stores",
        OFFLOAD,
        "return bool(len(self._retrieves) or len(self._stores) or self._lookups.releases)",
        "return bool(len(self._retrieves) or self._lookups.releases)",
    ),
    Mutation(
        "a request is summed up before its jobs end",
        OFFLOAD,
        "if it.phase is not Phase.FINISHED or it.jobs:",
        "if it.phase is not Phase.FINISHED:",
    ),
    Mutation(
        "numbers come back",
        OFFLOAD,
        "self._numbers = itertools.count(1)",
        "self._numbers = itertools.cycle(range(1, 9))",
    ),
    # ------------------------------------------------------------ tokens by tier
    Mutation(
        "a retrieve that failed is counted by tier",
        OFFLOAD,
        "            self.statistics.retrieves_failed += 1\n",
        "            self.statistics.tokens_from_disk += order.disk_tokens\n",
    ),
    Mutation(
        "what comes from disk is not counted",
        OFFLOAD,
        "            self.statistics.tokens_from_disk += order.disk_tokens\n",
        "",
    ),
    Mutation("a request's line leaves disks out", OFFLOAD, "            it.disk_tokens += order.disk_tokens\n", ""),
    Mutation(
        "the first chunks of a lease come from disk",
        RANGES,
        "(1 << lease.chunks) - (1 << max(0, lease.chunks - lease.chunks_on_disk))",
        "(1 << lease.chunks_on_disk) - 1",
    ),
    Mutation(
        "the last answer alone tells of disks",
        LOOKUPS,
        "it.disk_chunks |= chunks_from_disk",
        "it.disk_chunks = chunks_from_disk",
    ),
    Mutation(
        "what was read for an earlier wait counts once more",
        OFFLOAD,
        "it.hbm_tokens, it.disk_chunks, it.is_admitted = hbm_tokens, 0, True",
        "it.hbm_tokens, it.is_admitted = hbm_tokens, True",
    ),
    Mutation(
        "what HBM holds of a chunk comes from disk",
        RANGES,
        "before = begin % chunk_tokens if chunks >> first & 1 else 0",
        "before = 0",
    ),
    Mutation(
        "what is left of the last chunk comes from disk",
        RANGES,
        "behind = -end % chunk_tokens if chunks >> last & 1 else 0",
        "behind = 0",
    ),
    # ------------------------------------------------------------ a server that is still reading its disks
    Mutation(
        "what the server holds is not heard while it reads its disks",
        LOOKUPS,
        'if found.why in {"", RECOVERING}:',
        "if not found.why:",
    ),
    Mutation(
        "what was stored once is believed lost while disks are read",
        LOOKUPS,
        "if found.why and not it.stopped and held < it.frontier:",
        "if False:",
    ),
    Mutation(
        "what lies behind a gap is believed held while disks are read",
        LOOKUPS,
        "if found.why and not it.stopped and held < it.frontier:",
        "if found.why and held < it.frontier:",
    ),
    Mutation(
        "a gap is not closed that was met while disks are read",
        OFFLOAD,
        'if ended.why == "parent-absent" and it.held_for_sure is not None:',
        "if False:",
    ),
    Mutation(
        "a gap is closed again and again",
        OFFLOAD,
        "it.frontier, it.held_for_sure = it.held_for_sure, None\n",
        "it.frontier = it.held_for_sure\n",
    ),
    Mutation(
        "nobody waits for the store that may meet a gap",
        OFFLOAD,
        "it.lookup is not None or (it.held_for_sure is not None and it.storing)",
        "it.lookup is not None",
    ),
    Mutation(
        "an answer that knows all leaves the doubt",
        LOOKUPS,
        'it.frontier, it.stopped, it.held_for_sure = held, "", None',
        'it.frontier, it.stopped = held, ""',
    ),
    Mutation(
        "tokens missed while disks are read are counted as found",
        OFFLOAD,
        "it.answer is not None and it.answer.why != it.why",
        "it.answer is not None",
    ),
)

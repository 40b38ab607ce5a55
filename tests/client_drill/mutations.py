"""Deliberate bugs in the client, of a line or two each. A unit test of the file must notice every one."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A bug: `old` occurs exactly once in `file` (below client/kvclient/) and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


TESTS = {
    "transport/jobs.py": ("client_jobs", "client_parts"),
    "memory/blocks.py": ("client_blocks",),
    "transport/inquiries.py": ("client_inquiries",),
    "transport/lane.py": ("client_lane", "client_inquiries", "client_lookup"),
    "base/loop.py": ("client_loop", "client_guests"),
    "vllm/pins.py": ("vllm_pins",),
    "vllm/hbm.py": ("vllm_hbm",),
    "vllm/side_tensors.py": ("vllm_beside",),
    "vllm/layout.py": ("vllm_layout", "vllm_beside"),
    "sequences.py": ("client_sequences",),
    "transport/session.py": ("client_jobs", "client_connection"),
    "transport/transports.py": ("client_lookup", "client_jobs", "client_connection"),
    "transport/gate.py": ("client_lookup", "client_connection"),
    "transport/connection.py": ("client_connection", "client_jobs"),
    "transport/calls.py": ("client_lookup",),
    "client.py": ("client_jobs", "client_lookup"),
    "transport/caches.py": ("client_connection", "client_jobs"),
}
"""File -> its test files in tests/unit, without test_ and .py."""

MUTATIONS = (
    # ------------------------------------------------------------ jobs.py
    Mutation(
        "parts run ahead without bound",
        "transport/jobs.py",
        "return running < PARTS_AHEAD_MAX and self._parts_running <= spare",
        "return True",
    ),
    Mutation(
        "many parts run ahead when the server allows many jobs",
        "transport/jobs.py",
        "return running < PARTS_AHEAD_MAX and self._parts_running <= spare",
        "return self._parts_running <= spare",
    ),
    Mutation(
        "parts are begun after one that is not whole",
        "transport/jobs.py",
        "whole = whole and is_whole(len(results) - 1, results[-1])",
        "whole = True",
    ),
    Mutation(
        "a job ends before all its parts have",
        "transport/jobs.py",
        "while running or (whole and begun < count):",
        "while whole and (running or begun < count):",
    ),
    Mutation(
        "what runs ahead is never given back",
        "transport/jobs.py",
        "            finally:\n                self._parts_running -= 1",
        "            finally:\n                pass",
    ),
    Mutation(
        "the first part of a retrieve ends the lease", "transport/jobs.py", "more=index + 1 < len(parts)", "more=False"
    ),
    Mutation(
        "a part that is the caller's mistake is a miss",
        "transport/jobs.py",
        "problem, whole = problem or error, False",
        "whole = False",
    ),
    Mutation(
        "an unexpected error in a part is waited for",
        "transport/jobs.py",
        "            loop.settle(ended, nothing)  # unless one of the above came",
        "            pass",
    ),
    Mutation(
        "a lease of an earlier life is used",
        "transport/jobs.py",
        "if session.welcome.incarnation != lease.incarnation:",
        "if False:",
    ),
    Mutation(
        "a store claims what follows a short part",
        "transport/jobs.py",
        "sum(result.chunks for result in results[: leading + 1])",
        "sum(result.chunks for result in results)",
    ),
    Mutation("a store says why of its last part", "transport/jobs.py", "results[leading].why", "results[-1].why"),
    # ------------------------------------------------------------ blocks.py
    Mutation(
        "the chunks that blocks touch are not counted",
        "memory/blocks.py",
        "step = min(limits.blocks_max // per_chunk_all, PLACES_MAX // (per_chunk_all + 2 * len(per_chunk)))",
        "step = limits.blocks_max // per_chunk_all",
    ),
    Mutation(
        "a retrieve begins at its first group",
        "memory/blocks.py",
        "first, end = min(first for first, _ in ranges), max(end for _, end in ranges)",
        "first, end = ranges[0][0], max(end for _, end in ranges)",
    ),
    Mutation(
        "a retrieve ends with its first group",
        "memory/blocks.py",
        "first, end = min(first for first, _ in ranges), max(end for _, end in ranges)",
        "first, end = min(first for first, _ in ranges), ranges[0][1]",
    ),
    Mutation(
        "parts without blocks are sent",
        "memory/blocks.py",
        "return [part for part in parts if part]",
        "return list(parts)",
    ),
    Mutation(
        "a store is not cut by bytes",
        "memory/blocks.py",
        "step = min(step, part_chunks_max, PART_CHUNKS_MAX, max(1, by_bytes), max(1, by_frame))",
        "step = min(step, part_chunks_max, PART_CHUNKS_MAX, max(1, by_frame))",
    ),
    # ------------------------------------------------------------ inquiries.py
    Mutation(
        "a server that is late is asked on",
        "transport/inquiries.py",
        "                self._shut_gate(asked.link, Overdue())\n",
        "",
    ),
    Mutation(
        "what has time left is overdue",
        "transport/inquiries.py",
        "                if time.monotonic() < asked.due_s:\n                    break\n",
        "",
    ),
    Mutation(
        "a lost session stays in use",
        "transport/inquiries.py",
        "            if isinstance(problem, Lost):\n                self._shut_gate(link, problem)\n",
        "",
    ),
    Mutation(
        "a reply of another kind keeps its lane",
        "transport/inquiries.py",
        '            self._shut_gate(link, Lost("frame", f"expected Found, the server said {type(reply).__name__}"))',
        "            pass",
    ),
    Mutation(
        "one answer is waited for until the last",
        "transport/inquiries.py",
        "while self._asked and not self._answered and",
        "while self._asked and",
    ),
    Mutation(
        "a lease is counted from its answer",
        "transport/inquiries.py",
        "found_from(reply, link.incarnation, asked.asked_s)",
        "found_from(reply, link.incarnation, time.monotonic())",
    ),
    Mutation(
        "a lease of an earlier life is given back",
        "transport/inquiries.py",
        "if lease.incarnation == link.incarnation:",
        "if True:",
    ),
    Mutation(
        "a lane that fails to send stays open",
        "transport/inquiries.py",
        "            self._shut_gate(link, trouble)\n            self._end(number",
        "            self._end(number",
    ),
    Mutation(
        "a lane that fails to receive stays open",
        "transport/inquiries.py",
        "            self._shut_gate(link, trouble)\n\n    def _take(",
        "            pass\n\n    def _take(",
    ),
    Mutation(
        "a lease is not given back while the gate is shut",
        "transport/inquiries.py",
        "self._unreleased.append(lease)",
        "self._unreleased.extend([lease] if self._gate.link else [])",
    ),
    Mutation(
        "a lease is given back again and again",
        "transport/inquiries.py",
        "            self._unreleased.popleft()\n\n",
        "            break\n\n",
    ),
    Mutation(
        "what waits for room is sent to the next server",
        "transport/inquiries.py",
        "        if self._unsent_on is not link:\n            self._unsent.clear()\n",
        "",
    ),
    Mutation(
        "what waits for room waits for the next question",
        "transport/inquiries.py",
        "            if self._unsent:\n                self._send_unsent(link)\n            for reply",
        "            for reply",
    ),
    # ------------------------------------------------------------ lane.py
    Mutation(
        "a lane that was shut stays open",
        "transport/lane.py",
        "    def _leave(self) -> None:\n        if self._shut:\n            self._socket.close()",
        "    def _leave(self) -> None:\n        if False:\n            self._socket.close()",
    ),
    Mutation(
        "replies are told twice",
        "transport/lane.py",
        "taken, self._arrived = self._arrived, []",
        "taken = list(self._arrived)",
    ),
    Mutation(
        "who collects waits behind who asks",
        "transport/lane.py",
        "        if not self._takes_turn(due_s):\n            return []",
        "        self._lock.acquire()",
    ),
    Mutation(
        "one reply is waited for until the last",
        "transport/lane.py",
        "self._receive(0.0 if self._arrived else due_s)",
        "self._receive(due_s)",
    ),
    Mutation(
        "the lease of an interrupted lookup is kept",
        "transport/lane.py",
        "elif isinstance(reply, Found) and reply.lease:",
        "elif False:",
    ),
    Mutation("replies that came are waited for", "transport/lane.py", "            self._sent.discard(reply.id)\n", ""),
    Mutation(
        "a patience below a millisecond is for ever",
        "transport/lane.py",
        "patience_ms = int(left_s * 1000) + 1",
        "patience_ms = int(left_s * 1000)",
    ),
    # ------------------------------------------------------------ loop.py
    Mutation("a guest overtakes what was posted", "base/loop.py", "not (self._posts or self._ready)", "True"),
    Mutation(
        "a guest's deadline wakes nobody",
        "base/loop.py",
        "if self._ready or self._wake_at_s < self._sleeps_until_s:",
        "if self._ready:",
    ),
    Mutation("what a guest has begun is lost", "base/loop.py", "            self._ready.extend(self._new)\n", ""),
    Mutation(
        "deadlines are not looked at",
        "base/loop.py",
        "        self._wake_at_s = min(self._wake_at_s, waiter.due_s)",
        "        pass",
    ),
    Mutation(
        "the loop ends before what was posted",
        "base/loop.py",
        "            if self._posts:\n                return False\n",
        "",
    ),
    # ------------------------------------------------------------ pins.py
    Mutation(
        "the first rank unpins for all",
        "vllm/pins.py",
        "ranks_left.discard(rank)\n        if not ranks_left:",
        "ranks_left.discard(rank)\n        if True:",
    ),
    Mutation(
        "the head of a prefix comes back before its tail",
        "vllm/pins.py",
        "for blocks in self._kept.pop(request):\n                self._pool.free_blocks(reversed(blocks))",
        "for blocks in self._kept.pop(request):\n                self._pool.free_blocks(blocks)",
    ),
    Mutation("what ranks know of is dropped as untold", "vllm/pins.py", "        self._untold.clear()", "        pass"),
    Mutation("what no rank knows of stays pinned", "vllm/pins.py", "        self._untold.append(order.job)\n", ""),
    Mutation(
        "a name that is used again loses its first blocks",
        "vllm/pins.py",
        "self._kept.setdefault(request, []).extend(tables_kept)",
        "self._kept[request] = tables_kept",
    ),
    Mutation(
        "blocks are kept though nothing is stored",
        "vllm/pins.py",
        "if self._pool is not None and self._is_storing(request):",
        "if self._pool is not None:",
    ),
    Mutation(
        "kept blocks come back with the first store",
        "vllm/pins.py",
        "if request in self._kept and not self._is_storing(request):",
        "if request in self._kept:",
    ),
    # ------------------------------------------------------------ hbm.py
    Mutation(
        "hybrid engines are guessed at",
        "vllm/hbm.py",
        'is_plain = len(groups) == 1 and groups[0].kind == "full"',
        "is_plain = True",
    ),
    Mutation("HBM holds a block more", "vllm/hbm.py", "held = probe + 1", "held = probe + 2"),
    Mutation(
        "hashes of other blocks are believed",
        "vllm/hbm.py",
        "if self._cached is None or len(hashes) != request.num_tokens // (self._block_tokens or 1):",
        "if self._cached is None:",
    ),
    Mutation(
        "HBM holds nothing but its begin",
        "vllm/hbm.py",
        "                end = probe\n",
        "                end = held\n",
    ),
    # ------------------------------------------------------------ sequences.py
    Mutation(
        "a lease is good until its end",
        "sequences.py",
        "found.lease.expires_monotonic_s - LEASE_SPARE_S",
        "found.lease.expires_monotonic_s",
    ),
    Mutation("an answer outlives its server", "sequences.py", "and (lease is None or self._client.honours(lease))", ""),
    Mutation(
        "sequences are remembered without bound",
        "sequences.py",
        "if len(self._answers) >= self._sequences_max:",
        "if False:",
    ),
    # ------------------------------------------------------------ session.py
    Mutation(
        "a store overtakes the one that it continues",
        "transport/session.py",
        "        if not self._asks_by_zmq:",
        "        if True:",
    ),
    Mutation(
        "a wait on a lost session has no end",
        "transport/session.py",
        "        if self.lost is not None:\n            self._loop.fail(waiter, self.lost)\n        else:",
        "        if True:",
    ),
    # ------------------------------------------------------------ transports.py
    Mutation(
        "a lease that comes late is kept",
        "transport/transports.py",
        "            case Found(lease=lease) if lease:",
        "            case Found(lease=lease) if False:",
    ),
    Mutation(
        "what races can bring is the caller's mistake",
        "transport/transports.py",
        '(error.family == "request" and error.code not in RACES)',
        'error.family == "request"',
    ),
    Mutation("a bound that stays is tried again", "transport/transports.py", "if error.code in LASTING or", "if"),
    # ------------------------------------------------------------ gate.py
    Mutation(
        "who is late to notice undoes a reconnect",
        "transport/gate.py",
        "if shut is None or (link is not None and shut is not link):",
        "if shut is None:",
    ),
    Mutation(
        "the lane before stays open",
        "transport/gate.py",
        "        if before is not None:\n            before.lane.shut()\n",
        "",
    ),
    # ------------------------------------------------------------ connection.py
    Mutation(
        "pauses never get shorter again",
        "transport/connection.py",
        "                backoff.reset()  # not for a server",
        "                pass  # not for a server",
    ),
    Mutation(
        "a mover's end that the client saw first is its mistake",
        "transport/connection.py",
        "            if error.code == TWICE and cache.name in session.names:",
        "            if False:",
    ),
    Mutation(
        "descriptors that were used up are offered again",
        "transport/connection.py",
        "                if not trouble.unchanged:\n                    offered.clear()\n",
        "",
    ),
    Mutation(
        "a slow disk shuts the gate",
        "transport/connection.py",
        "if session.heard_s > max(asked_s, time.monotonic() - self.timeouts.probe_s):",
        "if False:",
    ),
    Mutation(
        "what was said before a job counts as a sign of life",
        "transport/connection.py",
        "max(asked_s, time.monotonic() - self.timeouts.probe_s)",
        "time.monotonic() - self.timeouts.probe_s",
    ),
    Mutation(
        "what was said long ago counts as a sign of life",
        "transport/connection.py",
        "max(asked_s, time.monotonic() - self.timeouts.probe_s)",
        "asked_s",
    ),
    # ------------------------------------------------------------ calls.py
    Mutation(
        "an async lookup that is late trips nothing",
        "transport/calls.py",
        "            self._connection.trip(overdue.why)\n",
        "",
    ),
    # ------------------------------------------------------------ client.py
    Mutation(
        "first parts take the spare jobs",
        "client.py",
        "link.limits.jobs_max - link.limits.jobs_max // SPARE_SHARE",
        "link.limits.jobs_max",
    ),
    Mutation(
        "async lookups have no bound",
        "client.py",
        "elif not self._lookup_slots.take(ASYNC_LOOKUPS_MAX):",
        "elif False:",
    ),
    # ------------------------------------------------------------ caches.py
    Mutation(
        "pidfds of movers stay open",
        "transport/caches.py",
        "        if self._retired and self.users == 0:\n            self._close()",
        "        pass",
    ),
    Mutation(
        "a pidfd is closed under its job",
        "transport/caches.py",
        "if self._retired and self.users == 0:",
        "if self._retired:",
    ),
    # ------------------------------------------------------------ side_tensors.py, vllm/layout.py
    Mutation(
        "weights count as tensors that came with the cache",
        "vllm/side_tensors.py",
        "is_new = str(held.tensor.device) in devices and _identity(held) not in self._before",
        "is_new = str(held.tensor.device) in devices",
    ),
    Mutation(
        "what lies on another device counts",
        "vllm/side_tensors.py",
        "is_new = str(held.tensor.device) in devices and _identity(held) not in self._before",
        "is_new = _identity(held) not in self._before",
    ),
    Mutation(
        "a tensor counts blocks only where there is one row for each",
        "vllm/side_tensors.py",
        "size and size % blocks == 0 and any(tokens % (size // blocks) == 0 for tokens in block_tokens)",
        "size == blocks",
    ),
    Mutation(
        "views of a registered cache count",
        "vllm/side_tensors.py",
        " and _memory(held.tensor) not in covered:",
        ":",
    ),
    Mutation(
        "scales that move are not noticed",
        "vllm/side_tensors.py",
        "if self._described not in (None, where):",
        "if False:",
    ),
    Mutation(
        "every engine's kv_scale is taken for ATOM's",
        "vllm/side_tensors.py",
        "type(layer).__module__.startswith(ATOM)",
        "True",
    ),
    Mutation(
        "scales are described and not stored",
        "vllm/layout.py",
        "runs += [run for tensor in kept for run in memory.part_runs(tensor, block_dim=1)]",
        "pass",
    ),
    Mutation(
        "an engine's scales are in no namespace",
        "vllm/layout.py",
        "return Layout(memory.allocations, regions, layers, orders, shown)",
        "return Layout(memory.allocations, regions, layers, orders)",
    ),
)

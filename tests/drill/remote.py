"""Deliberate bugs in the use of a remote store. The simulator is asked first, then tests with two servers."""

from tests.drill import service
from tests.drill.bugs import Bug
from tests.drill.copies import Copy, noticed_by
from tests.drill.service import REQUESTS, SERVICE, STATE

REMOTE = f"{SERVICE}/remote"
ANNOUNCEMENTS = f"{REMOTE}/announcements.py"
READS, EPOCHS, WRITES = f"{REMOTE}/reads.py", f"{REMOTE}/epochs.py", f"{REMOTE}/writes.py"
SEVERAL = "tests/unit/service/test_several_remotes.py"
OWN_TESTS = (
    *("tests/unit/service/test_remote_reads.py", "tests/unit/service/test_remote_epochs.py"),
    *("tests/unit/service/test_remote_writes.py", "tests/unit/service/test_remote_announcements.py"),
    "tests/unit/service/test_remote_misses.py",
    *("tests/unit/service/test_remote_status.py", SEVERAL),
    *("tests/unit/remote/test_epoch_lease.py", "tests/process/remote"),
)


def notice(bug: Bug) -> str:
    return noticed_by(bug, hunt)


def hunt(copy: Copy) -> str:
    found = copy.failing_seed("tests.sim", seed0=service.SEED0, seeds=service.SEEDS, events=service.EVENTS)
    return found or copy.failing_test(OWN_TESTS)


ENGINE_TESTS = ("tests/unit/movers/test_remote_engine.py", "tests/unit/remote/test_valkey.py")

BUGS = (
    Bug(
        "P1",
        "a payload that has changed in DRAM is sent to a store",
        "kvserver/movers/remote_checks.py",
        r"if count != shard\.payload_bytes or [^\n]*:",
        "if count != shard.payload_bytes:",
        ENGINE_TESTS,
    ),
    Bug(
        "P1",
        "a payload that is copied for a store is not compared",
        "kvserver/movers/remote_checks.py",
        r"self\._compare\(index, digest_copy\(([^\n]*)\)\)\n",
        r"digest_copy(\1)\n",
        ENGINE_TESTS,
    ),
    Bug(
        "P1",
        "a chunk is sealed although its epoch does not count any more",
        READS,
        r'fault = report\.fault or \("" if [^\n]*',
        "fault = report.fault",
    ),
    Bug(
        "P1",
        "a prefix with a hole is read",
        READS,
        r"(tier\.failed\(\"probe\", fault\)) break",
        r"\1\n            continue",
    ),
    Bug("P1", "a head of another chunk is believed", READS, r"!= name or groups_of", "!= (name and ()) and groups_of"),
    Bug(
        "P1",
        "a shard of another size is read",
        READS,
        r"or space\.parts\[part\]\.payload_bytes != shard\.payload_bytes",
        "",
    ),
    Bug("P1", "a group is read of which a shard is missing", READS, r"if any\(part not in told [^\n]*", "if False:"),
    Bug(
        "P1",
        "a chunk is read without a group that a prefix needs",
        READS,
        r"return groups if groups & space\.needed == space\.needed else None",
        "return groups",
    ),
    Bug(
        "P1",
        "a slot is given back while the mover may still fill it",
        f"{REMOTE}/mover.py",
        r"(def overdue[^\n]*\n[^\n]*\n)",
        r"\1    gone(core, tier, 0)\n",
    ),
    Bug(
        "P8",
        "own copies stay when another server has cleared the namespace",
        EPOCHS,
        r"clear_namespaces\.forget\(core, \[digest\]\)",
        "pass",
    ),
    Bug(
        "P8",
        "records on disk stay when another server has cleared the namespace",
        EPOCHS,
        r"core\.disk\.void\(digest\)",
        "pass",
    ),
    Bug("P8", "a Clear is answered before the store knows", f"{STATE}/clears.py", r"if clear\.stores or any", "if any"),
    Bug(
        "P8",
        "chunks of the store are used while a Clear is owed",
        f"{STATE}/remote_tier.py",
        r"None if known is None or known\.owes_clear else",
        "None if known is None else",
    ),
    Bug(
        "P8",
        "the next brain does not know to which epoch its chunks belong",
        EPOCHS,
        r"core\.emit\(PutNamespace[^\n]*",
        "pass",
    ),
    Bug(
        "P8",
        "an engine that registers before the disk is read hides to which epoch the records there belong",
        "kvserver/service/disk/recovery.py",
        r"space\.belongs_to_epochs\(told\.epochs \| space\.epochs\)",
        "pass",
    ),
    Bug(
        "P8",
        "a Clear that failed is not tried again",
        EPOCHS,
        r"if known\.owes_clear:",
        "if known.owes_clear and not known.try_again_ns:",
    ),
    Bug("P1", "a write keeps no pin on its chunk", WRITES, r"core\.chunks\.pin\(node\)", "pass"),
    Bug("P1", "a chunk that was found wrong stays", WRITES, r"mismatches\.drop\(core, digest, node, now_ns\)", "pass"),
    Bug(
        "P1",
        "chunks below one that could not be written keep it out of the store",
        WRITES,
        r"below \+= \(child for [^\n]*",
        "pass",
    ),
    Bug(
        "P3",
        "a lookup says that more comes although nothing moves",
        f"{REQUESTS}/pursuits.py",
        r"if pursuit is None or _is_stalled\(core, pursuit, now_ns\):",
        "if pursuit is None:",
    ),
    Bug(
        "P8",
        "every chunk that is missing is looked for",
        f"{STATE}/remote_tier.py",
        r"return not self\.known\.is_written\(self[^\n]*",
        "return False",
    ),
    Bug(
        "P8",
        "what was settled of misses outlives a Clear here",
        f"{STATE}/remote_tier.py",
        r"self\.passing = None\n        self\.owes_again",
        "self.owes_again",
    ),
    Bug(
        "P8",
        "what was settled of misses outlives a note that tells another epoch",
        f"{STATE}/remote_tier.py",
        r"self\.has_job, self\.passing = False, None",
        "self.has_job = False",
    ),
    Bug(
        "P8",
        "what was settled of misses outlives the belief in announcements",
        f"{STATE}/remote_tier.py",
        r"are_incomplete\(now_ns\)\n        self\.passing = None",
        "are_incomplete(now_ns)",
    ),
    Bug(
        "P8",
        "what was settled of misses outlives the mover that had heard",
        f"{STATE}/remote_tier.py",
        r"self\.announcements\.mover_ended\(\)\n        self\.passing = None",
        "self.announcements.mover_ended()",
    ),
    Bug(
        "P8",
        "misses are passed over although no epoch counts any more",
        f"{STATE}/remote_tier.py",
        r"min\((known\.announcements\.believed_until_ns\(epoch, now_ns\)), [^\n]*\)\n",
        r"\1\n",
    ),
    Bug(
        "P8",
        "misses are passed over although more was told than can be known",
        f"{STATE}/remote_tier.py",
        r" or passing\.forgotten != self\.known\.forgotten",
        "",
    ),
    Bug(
        "P8",
        "a note that the store does not keep is written anew each second",
        "kvserver/remote/epoch_lease.py",
        r"self\._write_again_s = began_s \+ self\._pause_s",
        "pass",
    ),
    Bug(
        "P8",
        "nodes that a cluster has no more are kept",
        "kvserver/movers/remote_engine.py",
        r"del self\._nodes\[gone\]",
        "pass",
        ENGINE_TESTS,
    ),
    Bug(
        "P8",
        "namespaces on a dead node keep others waiting",
        "kvserver/movers/remote_engine.py",
        r"if self\._late and [^\n]*:",
        "if False:",
        ENGINE_TESTS,
    ),
    Bug(
        "P8",
        "callers who wait for a store are not bounded",
        "kvserver/service/state/remote_tier.py",
        r"max\(len\(known\.clears\), known\.owes_clear\)",
        "known.owes_clear",
    ),
    Bug(
        "P8",
        "a miss is never the one to be tried",
        f"{STATE}/passing.py",
        r"self\.announcements\.untried > 0 and ",
        "",
    ),
    Bug(
        "P8",
        "the store is asked more than once a second whether announcements are complete",
        f"{STATE}/announcements.py",
        r"self\.try_from_ns = now_ns \+ [^\n]*",
        "pass",
    ),
    Bug("P8", "an announced chunk is passed over", f"{STATE}/passing.py", r"self\.in_store\.kind_of[^\n]*", "True"),
    Bug(
        "P8",
        "a chunk that was found by a try makes nothing doubtful",
        ANNOUNCEMENTS,
        r"tier\.epochs\[[^\n]*is_doubtful\(now_ns\)",
        "pass",
    ),
    Bug(
        "P8",
        "marks count although nobody could read them for long",
        f"{STATE}/announcements.py",
        r"or now_ns - self\.heard_ns > [^\n]*:",
        "or False:",
    ),
    Bug(
        "P8",
        "a namespace counts as heard before all was read",
        f"{STATE}/announcements.py",
        r"if is_all and epoch == self\.epoch:",
        "if epoch == self.epoch:",
    ),
    Bug(
        "P8",
        "marks of an older epoch count for the new one",
        f"{STATE}/announcements.py",
        r"self\.epoch, self\.heard_ns, self\.doubted_until_ns = epoch, None, 0",
        "self.epoch = epoch",
    ),
    Bug(
        "P8",
        "the part that a second rank stores is a second use",
        f"{REQUESTS}/transfers.py",
        r"if not was_whole and job\.space\.is_whole\(node\):",
        "if True:",
    ),
    Bug(
        "P8",
        "of a chain that the store has lost one chunk is written again",
        ANNOUNCEMENTS,
        r"elif position < len\(absent\) and absent\[position\] and is_told:",
        "elif position == found and is_told:",
    ),
    Bug(
        "P8",
        "a chunk that is gone from the store is never written again",
        f"{STATE}/remote_tier.py",
        r"return kind in \(STORED, GONE\)",
        "return kind == STORED",
    ),
    Bug(
        "P8", "nobody is told that a chunk is gone", ANNOUNCEMENTS, r"tier\.tell\(pursuit\.space, mark, GONE\)", "pass"
    ),
    Bug(
        "P8",
        "nobody is told that a chunk was written",
        ANNOUNCEMENTS,
        r"tier\.tell\(space, mark, WRITTEN\)",
        "pass",
    ),
    Bug(
        "P1",
        "a slot of a read that was left is used while the mover may still fill it",
        "kvserver/service/holdings/chunks.py",
        r"if pending is not None and job in pending\.parts\.values\(\): self\.discard\(pending\.space, node, reason\)",
        "for part in list(pending.parts if pending else ()):\n            self.give_up(node, part, job, reason)",
        (SEVERAL,),
    ),
    Bug(
        "P8",
        "a Clear is answered when one of several stores knows",
        f"{STATE}/clears.py",
        r"self\.stores\.discard\(\(store, namespace\)\)",
        "self.stores = {known for known in self.stores if known[1] != namespace}",
        (SEVERAL,),
    ),
    Bug(
        "P8",
        "the note of one store counts for another",
        f"{STATE}/remote_tier.py",
        r"last_seen = epochs\.get\(self\.name, next\(iter\(epochs\.values\(\)\), None\)\)",
        "last_seen = epochs.get(self.name)",
        (SEVERAL,),
    ),
    Bug(
        "P8",
        "what came from one store is written to another",
        WRITES,
        r"if any\(node\.queued & other[^\n]*",
        "if False:",
        (SEVERAL,),
    ),
    Bug(
        "P8",
        "after a restart what another store has is written",
        WRITES,
        r"return not node\.queued & STORED and [^\n]*",
        "return False",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "a store that does not answer keeps chunks from the others",
        f"{REQUESTS}/pursuits.py",
        r"if pursuit is None or \(len\(core\.remotes\) > 1 and _is_stalled\(core, pursuit, now_ns\)\):",
        "if pursuit is None:",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "the slowest store is asked first",
        f"{REQUESTS}/pursuits.py",
        r"tier\.seconds_for\(count, now_ns\)\)",
        "-tier.seconds_for(count, now_ns))",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "a store that is said to have nothing is asked first",
        f"{REQUESTS}/pursuits.py",
        r"return 2 if tier\.was_left\(now_ns\) else 0",
        "return 1",
        (SEVERAL,),
    ),
    Bug(
        "P3", "a read that was left has no end", f"{STATE}/remote_tier.py", r"self\.drop\(pursuit\)", "pass", (SEVERAL,)
    ),
    Bug(
        "P2",
        "a store that brings nothing is tried first for ever",
        f"{STATE}/remote_tier.py",
        r"self\.tried_ns = pursuit\.moved_ns",
        "pass",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "a store that was left counts as fast as before",
        f"{STATE}/remote_tier.py",
        r"self\.answer_s = max\([^\n]*",
        "pass",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "a store that was left is asked again for what it did not bring",
        f"{REQUESTS}/pursuits.py",
        r"pursuit\.space\.digest, key, now_ns \+ LEFT_MS",
        "pursuit.space.digest, pursuit.keys[0], now_ns + LEFT_MS",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "a store that was left is asked first again and left again",
        f"{REQUESTS}/pursuits.py",
        r"return 2 if tier\.was_left\(now_ns\) else 0",
        "return 0",
        (SEVERAL,),
    ),
    Bug(
        "P2",
        "what came from another store is walked at each use",
        WRITES,
        r"tier\.leave_out\(tail[^\n]*",
        "pass",
        (SEVERAL,),
    ),
    Bug("P7", "bytes that came too late are counted", READS, r"if any\(sealed\):", "if sealed:", (SEVERAL,)),
)

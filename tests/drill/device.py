"""Deliberate bugs in the GPU part. Each names the tests on the simulated drivers that must notice it.

Most of them remove the handling of a driver's surprising behaviour."""

from functools import cache
from threading import Lock

from tests.drill.bugs import ROOT, Bug, change_of
from tests.drill.workshop import Workshop

GPU, DEVICE = "csrc/gpu", "tests/device"
LINKS, TRAPS, LIVES = f"{DEVICE}/test_links.py", f"{DEVICE}/test_traps.py", f"{DEVICE}/test_lives_device.py"
DIGESTS = f"{DEVICE}/test_digest_jobs.py"
GIL = r"""int ensure() asm("PyGILState_Ensure");
            void release(int) asm("PyGILState_Release");
            release(ensure());
            """
"""Takes and releases the GIL."""

_one_at_a_time = Lock()


@cache
def workshop() -> Workshop:
    made = Workshop(ROOT / "build" / "drill")
    made.build()
    made.check()
    return made


@cache
def failed_before(tests: tuple[str, ...]) -> str:
    return workshop().failing_test(tests)


def notice(bug: Bug) -> str:
    change = change_of(bug)
    with _one_at_a_time:
        if failed := failed_before(bug.tests):
            raise SystemExit(f"on the unbroken copy: {failed}")
        return workshop().suffer(change, bug.tests)


BUGS = (
    # ------------------------------------------------------------ P1: no bytes but those stored under that key
    Bug(
        "P1",
        "a refused batch is not copied at all",
        GPU,
        r"if \(!has_batch\(\) \|\| !enqueue_batch\(way, batch, stream\)\)",
        r"if (!has_batch() || (enqueue_batch(way, batch, stream), false))",
        (f"{TRAPS} -k refused",),
    ),
    Bug(
        "P1",
        "handles are made of pointers into an allocation",
        GPU,
        r"driver\.ipc_get\(range\.base\)\}",
        r"driver.ipc_get(pointer)}",
        (f"{DEVICE}/test_client_device.py -k one_handle",),
    ),
    Bug(
        "P1",
        "a tensor is taken for the begin of its allocation",
        "client/kvclient/memory/device.py",
        r"\(index_of\[allocation\.base\], buffer\.address - allocation\.base\)",
        r"(index_of[allocation.base], 0)",
        (f"{TRAPS} -k begin_of_its_allocation",),
    ),
    Bug(
        "P1",
        "devices are told apart by their order",
        GPU,
        r"if \(device_id\(driver, ordinal\) == id\)",
        r"if (!id.empty())",
        (f"{TRAPS} -k numbered_otherwise",),
    ),
    Bug(
        "P1",
        "memory of another device is taken",
        GPU,
        r"if \(ordinal && \*ordinal != ordinal_\)",
        r"if (ordinal && *ordinal < 0)",
        (f"{DEVICE}/test_bad_input_device.py -k another_device",),
    ),
    Bug(
        "P1",
        "memory that is too small is taken",
        GPU,
        r"if \(entry\.bytes < bytes\)",
        r"if (entry.bytes == 0)",
        (f"{DEVICE}/test_bad_input_device.py -k bad_handles",),
    ),
    Bug(
        "P1",
        "a copy goes on behind what was registered as one",
        GPU,
        r"std::min\(copy\.bytes - done, unit_bytes_ - offset % unit_bytes_\)",
        r"copy.bytes - done",
        (f"{LINKS} -k both_directions",),
    ),
    Bug(
        "P1",
        "a buffer is copied out before the device has filled it",
        GPU,
        r"load\.step == Step::TRANSFER \? load\.buffer->event\.done\(\) : load\.buffer->left == 0",
        r"load.step == Step::TRANSFER || load.buffer->left == 0",
        (LINKS,),
    ),
    Bug("P1", "a buffer is taken twice", GPU, r"buffer\.taken = true;", r"", (LINKS,)),
    Bug(
        "P1",
        "kernels are kept whatever compiled them",
        GPU,
        r"std::string key = rtc\.name\(\) \+ ",
        r"std::string key = std::string() + ",
        (f"{DEVICE}/test_driver.py -k another_compiler",),
    ),
    Bug(
        "P1",
        "a direct retrieve is summed before its bytes are there",
        GPU,
        r"if \(order_\.kind == JobKind::RETRIEVE && landed_before\(\) < pass_end_\) return false;",
        r"",
        (f"{DIGESTS} -k planted",),
    ),
    Bug(
        "P1",
        "bytes that overtake others count for them",
        GPU,
        r"landed_before\(\) < pass_end_",
        r"landed_bytes_ < pass_end_",
        (f"{DIGESTS} -k have_landed",),
    ),
    Bug(
        "P1",
        "a direct retrieve goes region after region, and is summed chunk after chunk",
        GPU,
        r"order_\.kind, StreamOrder::SHARDS\);",
        r"order_.kind);",
        (f"{DIGESTS} -k have_landed",),
    ),
    Bug(
        "P1",
        "a sum beyond all sums is believed",
        GPU,
        r"sums\[index\]\.sum < DIGEST_PRIME && ",
        r"",
        (f"{DIGESTS} -k believed",),
    ),
    Bug(
        "P1",
        "bytes that a retrieve leaves in staging are not summed",
        f"{GPU}/staging",
        r"const bool rests = copy && copy->way == Way::TO_DEVICE;",
        r"const bool rests = false;",
        (f"{DIGESTS} -k planted",),
    ),
    Bug(
        "P1",
        "a link does not wait for the gather, nor do its sums",
        GPU,
        r"link\(flight, packed\);",
        r"link(flight, nullptr);",
        (f"{DIGESTS} -k late",),
    ),
    Bug(
        "P1",
        "what an earlier kernel reported counts",
        GPU,
        r"report\.launch == pass\.launch \? digest_sum\(report\.shares\) : DigestSum\(\)",
        r"digest_sum(report.shares)",
        (f"{DIGESTS} -k mistake",),
    ),
    # ------------------------------------------------------------ P2: every failure is a miss within its deadline
    Bug(
        "P2",
        "copies wait for Python",
        f"{GPU}/engine/pump.cpp",
        r"(const bool begun = admit\(\);)",
        GIL + r"\1",
        (f"{LIVES} -k copies_need",),
    ),
    Bug(
        "P2",
        "a segment that the client faulted stays in use",
        GPU,
        r"(case PackState::FAULT:) packer_->recycle\(flight\.segment\);",
        r"\1",
        (f"{DEVICE}/test_engine_jobs.py -k faulted",),
    ),
    Bug(
        "P2",
        "events are asked for while a capture forbids it",
        f"{GPU}/staging/event_watch.cpp",
        r"driver\.relax_capture_mode\(\);",
        r"",
        (f"{DEVICE}/test_client_device.py -k capture",),
    ),
    # ------------------------------------------------------------ P3: a dead engine's mappings are freed
    Bug(
        "P3",
        "allocations of dead engines stay open",
        GPU,
        r"for \(const IpcHandle& handle : cache\.handles\) imports_\.close\(handle\);",
        r"KV_ASSERT(!cache.handles.empty());",
        (f"{DEVICE}/test_deaths.py -k killed_while_bytes_move_is_free",),
    ),
    Bug(
        "P3",
        "an allocation is closed with its first cache",
        GPU,
        r"if \(--found->second\.uses > 0\) return;",
        r"--found->second.uses;",
        (f"{TRAPS} -k opened_once",),
    ),
)

"""Deliberate bugs of the GPU part, of one or two lines each. A test named in the mutation must notice each of them.

Most of them remove the handling of surprising driver behaviour: each of test_traps.py's traps is here.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A bug: `old` occurs exactly once in `file` and becomes `new`. tests: below tests/, with " -k words" after the
    file.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


DRIVER, IMPORTS, EXPORTER = "csrc/gpu/driver/driver.cpp", "csrc/gpu/engine/imports.cpp", "csrc/gpu/staging/exporter.cpp"
ENGINE, REGISTERED, BOUNCE = (
    "csrc/gpu/engine/device_engine.cpp",
    "csrc/gpu/engine/registered_link.cpp",
    "csrc/gpu/engine/bounce_link.cpp",
)
FACTS, HANDLES, KERNELS = "csrc/gpu/driver/facts.cpp", "csrc/gpu/driver/handles.h", "csrc/gpu/kernels/kernels.cpp"
LIBRARY, PUMP = "csrc/gpu/driver/library.cpp", "csrc/gpu/engine/pump.cpp"
JOB = "csrc/gpu/engine/device_job.cpp"
WATCH, COPIER, CLIENT = (
    "csrc/gpu/staging/event_watch.cpp",
    "csrc/gpu/staging/staged_copier.cpp",
    "client/kvclient/memory/device.py",
)

GIL = """
            int ensure() asm("PyGILState_Ensure");
            void release(int) asm("PyGILState_Release");
            release(ensure());
"""
"""Takes and releases the GIL."""


def traps(words: str) -> tuple[str, ...]:
    return (f"device/test_traps.py -k {words}",)


MUTATIONS = (
    # ------------------------------------------------------------ batches of copies
    Mutation(
        "AMD is given attributes for a batch",
        DRIVER,
        "const size_t given_count = cuda() ? 1 : 0;",
        "const size_t given_count = 1;",
        traps("batch_copies_work"),
    ),
    Mutation(
        "AMD is given a list of no attributes",
        DRIVER,
        "void* const given = cuda() ? &attributes : nullptr;",
        "void* const given = &attributes;",
        traps("batch_copies_work"),
    ),
    Mutation(
        "NVIDIA is given no attribute for a batch",
        DRIVER,
        "const size_t given_count = cuda() ? 1 : 0;",
        "const size_t given_count = 0;",
        traps("batch_copies_work"),
    ),
    Mutation(
        "batches of any length",
        DRIVER,
        "constexpr size_t BATCH_MAX = 8192;",
        "constexpr size_t BATCH_MAX = 1 << 20;",
        ("device/test_driver.py -k keep_every_byte",),
    ),
    Mutation(
        "a driver without batches is a failure",
        DRIVER,
        "if (code == NOT_SUPPORTED) {",
        "if (code == NOT_READY) {",
        traps("refused"),
    ),
    Mutation(
        "a refused batch is not copied at all",
        DRIVER,
        "if (!has_batch() || !enqueue_batch(way, batch, stream)) {",
        "if (!has_batch() || (enqueue_batch(way, batch, stream), false)) {",
        traps("refused"),
    ),
    Mutation(
        "a refused batch is tried again every time",
        DRIVER,
        "        batch_works_.store(false, std::memory_order_relaxed);\n        return false;",
        "        return false;",
        traps("refused"),
    ),
    # ------------------------------------------------------------ memory of another process
    Mutation(
        "handles are opened with another flag",
        DRIVER,
        "KV_GET(Address, ipc_open, handle, IPC_LAZY_PEER_ACCESS);",
        "KV_GET(Address, ipc_open, handle, 0);",
        traps("begin_of_its_allocation"),
    ),
    Mutation(
        "handles are made of pointers into an allocation",
        EXPORTER,
        "driver.ipc_get(range.base)}",
        "driver.ipc_get(pointer)}",
        ("device/test_client_device.py -k one_handle",),
    ),
    Mutation(
        "a tensor is taken for the begin of its allocation",
        CLIENT,
        "(index_of[allocation.base], buffer.address - allocation.base)",
        "(index_of[allocation.base], 0)",
        traps("begin_of_its_allocation"),
    ),
    Mutation(
        "equal process numbers are not explained",
        IMPORTS,
        "if (error.code == INVALID_CONTEXT) {",
        "if (error.code == NOT_READY) {",
        traps("equal_process_numbers"),
    ),
    Mutation(
        "modes of handles are not compared",
        ENGINE,
        "if (order.order.ipc_mode != ours) {",
        "if (order.order.ipc_mode.empty() && !ours.empty()) {",
        traps("different_modes"),
    ),
    Mutation(
        "the mode of handles is not looked at",
        FACTS,
        'return legacy && std::string(legacy) == "1" ? "legacy" : "dmabuf";',
        'return legacy && std::string(legacy) == "2" ? "legacy" : "dmabuf";',
        traps("different_modes"),
    ),
    Mutation(
        "an allocation is opened for each cache",
        IMPORTS,
        "auto found = entries_.find(key);",
        "auto found = entries_.end();",
        traps("opened_once"),
    ),
    Mutation(
        "an allocation is closed with its first cache",
        IMPORTS,
        "if (--found->second.uses > 0) return;",
        "--found->second.uses;",
        traps("opened_once"),
    ),
    Mutation(
        "allocations of dead engines stay open",
        ENGINE,
        "for (const IpcHandle& handle : cache.handles) imports_.close(handle);",
        "KV_ASSERT(!cache.handles.empty());",
        ("device/test_deaths.py -k killed_while_bytes_move_is_free",),
    ),
    Mutation(
        "memory that is not exported is a driver's error",
        EXPORTER,
        "refuse_export(driver, range.base, error.what());",
        "throw;",
        ("device/test_client_device.py -k cannot_be_shared",),
    ),
    Mutation(
        "devices are told apart by their order",
        FACTS,
        "if (device_id(driver, ordinal) == id) return ordinal;",
        "if (!id.empty()) return ordinal;",
        traps("numbered_otherwise"),
    ),
    Mutation(
        "memory of another device is taken",
        IMPORTS,
        "if (ordinal && *ordinal != ordinal_) {",
        "if (ordinal && *ordinal < 0) {",
        ("device/test_bad_input_device.py -k another_device",),
    ),
    Mutation(
        "memory that is too small is taken",
        IMPORTS,
        "if (entry.bytes < bytes) {",
        "if (entry.bytes == 0) {",
        ("device/test_bad_input_device.py -k bad_handles",),
    ),
    # ------------------------------------------------------------ addresses of host memory
    Mutation(
        "device addresses of slabs are counted from the first one's",
        REGISTERED,
        "units_[unit] = driver_.host_address(begin);",
        "units_[unit] = unit == 0 ? driver_.host_address(begin) : units_[0] + unit * unit_bytes_;",
        ("device/test_links.py -k both_directions",),
    ),
    Mutation(
        "registered memory has the host's address",
        REGISTERED,
        "units_[unit] = driver_.host_address(begin);",
        "units_[unit] = reinterpret_cast<Address>(begin);",
        traps("unrelated_device_addresses"),
    ),
    Mutation(
        "pinned memory has the host's address",
        HANDLES,
        "address_(driver.host_address(get()))",
        "address_(reinterpret_cast<Address>(get()))",
        traps("begin_of_its_allocation"),
    ),
    Mutation(
        "a copy goes on behind what was registered as one",
        REGISTERED,
        "const uint64_t bytes = std::min(copy.bytes - done, unit_bytes_ - offset % unit_bytes_);",
        "const uint64_t bytes = copy.bytes - done;",
        ("device/test_links.py -k both_directions",),
    ),
    Mutation(
        "what is not registered yet is used",
        REGISTERED,
        "        all = false;\n",
        "",
        ("device/test_engine_jobs.py -k part_of_the_arena",),
    ),
    # ------------------------------------------------------------ the bounce ring
    Mutation(
        "a buffer is copied out before the device has filled it",
        BOUNCE,
        "load.step == Step::TRANSFER ? load.buffer->event.done() : load.buffer->left == 0;",
        "load.step == Step::TRANSFER || load.buffer->left == 0;",
        ("device/test_links.py",),
    ),
    Mutation(
        "a buffer is sent before the crew has filled it",
        BOUNCE,
        "load.step == Step::TRANSFER ? load.buffer->event.done() : load.buffer->left == 0;",
        "load.step == Step::COPY || load.buffer->event.done();",
        ("device/test_links.py",),
    ),
    Mutation(
        "parts of a buffer lie on each other",
        BOUNCE,
        "            host += part.bytes;\n        }\n        left =",
        "        }\n        left =",
        ("device/test_links.py",),
    ),
    Mutation(
        "a buffer is taken twice",
        BOUNCE,
        "        buffer.taken = true;\n",
        "",
        ("device/test_links.py",),
    ),
    # ------------------------------------------------------------ beside the engine
    Mutation(
        "events are asked for while a capture forbids it",
        WATCH,
        "            driver.relax_capture_mode();\n",
        "",
        ("device/test_client_device.py -k capture",),
    ),
    Mutation(
        "packing is looked after while a capture forbids it",
        COPIER,
        "            driver.relax_capture_mode();\n",
        "",
        traps("stream_capture"),
    ),
    Mutation(
        "streams wait for the engine's default stream",
        DRIVER,
        "KV_GET(StreamPointer, stream_create, STREAM_NON_BLOCKING,",
        "KV_GET(StreamPointer, stream_create, 0,",
        traps("begin_of_its_allocation"),
    ),
    Mutation(
        "blocks of threads that are no whole wavefronts",
        KERNELS,
        "driver_.launch(way == Way::TO_HOST ? gather_ : scatter_, blocks, THREADS,",
        "driver_.launch(way == Way::TO_HOST ? gather_ : scatter_, blocks, 32,",
        traps("begin_of_its_allocation"),
    ),
    Mutation(
        "packing waits for Python",
        COPIER,
        "            const bool running = look_after(moved);\n",
        GIL + "            const bool running = look_after(moved);\n",
        ("device/test_lives_device.py -k packing_needs",),
    ),
    Mutation(
        "copying waits for Python",
        PUMP,
        "            const bool begun = admit();\n",
        GIL + "            const bool begun = admit();\n",
        ("device/test_lives_device.py -k copies_need",),
    ),
    # ------------------------------------------------------------ which library, which kernels
    Mutation(
        "a library is loaded beside the one that the process has",
        LIBRARY,
        "!mapped.empty()) {",
        "mapped == path) {",
        ("device/test_driver.py -k has_loaded",),
    ),
    Mutation(
        "calls that are broken on AMD are asked for",
        LIBRARY,
        "    std::string missing;\n",
        '    std::string missing;\n    if (path == "?") dlsym(nullptr, "hipIpcOpenEventHandle");\n',
        traps("are_not_known"),
    ),
    Mutation(
        "more than a gibibyte is registered at once",
        "kvserver/config/config.py",
        '            "most.",\n            most=GIB,',
        '            "most.",\n            most=64 * GIB,',
        traps("gibibyte"),
    ),
    Mutation(
        "a segment that the client faulted stays in use",
        JOB,
        "        case PackState::FAULT:\n            packer_->recycle(flight.segment);\n",
        "        case PackState::FAULT:\n",
        ("device/test_engine_jobs.py -k faulted",),
    ),
    Mutation(
        "kernels are kept whatever compiled them",
        KERNELS,
        'std::string key = rtc.name() + "\\n" + arch + "\\n";',
        'std::string key = arch + "\\n";',
        ("device/test_driver.py -k another_compiler",),
    ),
    Mutation(
        "kernels are kept whatever they are for",
        KERNELS,
        '    std::string key = rtc.name() + "\\n" + arch + "\\n";\n'
        '    for (const std::string& option : rtc.options(arch)) key += option + "\\n";\n',
        '    std::string key = rtc.name() + "\\n";\n',
        ("device/test_driver.py -k another_compiler",),
    ),
)

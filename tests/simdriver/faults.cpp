// What goes wrong on purpose, what is forbidden during a capture, and which device a thread uses.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

constexpr useconds_t HANG_LOOK_US = 1000;
constexpr int CAPTURE_GLOBAL = 0;

std::atomic<int> sticky_code{SUCCESS};
std::atomic<bool> capturing{false};
std::atomic<bool> invalidated{false};
thread_local int capture_mode = CAPTURE_GLOBAL;

char contexts[DEVICES];                       // their addresses are the contexts, by ordinal
thread_local std::vector<int> context_stack;  // ordinals
thread_local int hip_ordinal = 0;

// Takes one of what is left of a count; false when nothing is.
bool take_one(std::atomic<int32_t>& left) {
    int32_t before = left.load();
    while (before > 0 && !left.compare_exchange_weak(before, before - 1)) continue;
    return before > 0;
}

bool meets(Rule& rule, const char* symbol) {
    if (!rule.active.load() || std::strncmp(rule.symbol, symbol, NAME_BYTES) != 0) return false;
    if (rule.pid != 0 && rule.pid != static_cast<uint32_t>(getpid())) return false;
    return !take_one(rule.skip) && take_one(rule.times);
}

bool is_unsafe_while_capturing(Symbol symbol) {
    switch (symbol) {
        case Symbol::alloc:
        case Symbol::free:
        case Symbol::host_alloc:
        case Symbol::host_free:
        case Symbol::host_register:
        case Symbol::host_device_pointer:
        case Symbol::module_load:
        case Symbol::event_query:
        case Symbol::stream_query:
            return true;
        default:
            return false;
    }
}

}  // namespace

int enter(Symbol symbol, Needs needs) {
    if (needs != Needs::NOTHING && !attached()) {
        if (const int code = HIP ? attach() : NOT_INITIALIZED) return code;
    }
    if (!attached()) return SUCCESS;
    state().counters[static_cast<unsigned>(symbol)].calls.fetch_add(1);
    if (const int code = sticky()) return code;
    if (const int code = consult(name_of(symbol)).code) return code;
    if (capturing.load() && capture_mode != kv::gpu::CAPTURE_RELAXED && is_unsafe_while_capturing(symbol)) {
        invalidated.store(true);
        return CAPTURE_UNSUPPORTED;
    }
    if (needs == Needs::DEVICE && current_device() < 0) return INVALID_CONTEXT;
    return SUCCESS;
}

Verdict consult(const char* symbol) {
    if (!symbol) return {};
    for (Rule& rule : state().rules) {
        if (!meets(rule, symbol)) continue;
        rule.met.fetch_add(1);
        switch (rule.action) {
            case Action::CODE:
                return {.code = rule.code};
            case Action::STICKY:
                make_sticky(rule.code);
                return {.code = rule.code};
            case Action::HANG:
                while (rule.active.load()) usleep(HANG_LOOK_US);
                return {};
            case Action::DELAY:
                usleep(static_cast<useconds_t>(rule.delay_us));
                return {};
            case Action::CORRUPT:
                return {.corrupt = true};
        }
    }
    return {};
}

int sticky() { return sticky_code.load(); }

void make_sticky(int code) {
    int none = SUCCESS;
    sticky_code.compare_exchange_strong(none, code);
}

int exchange_capture_mode(int* mode) {
    if (*mode < CAPTURE_GLOBAL || *mode > kv::gpu::CAPTURE_RELAXED) return INVALID_VALUE;
    std::swap(*mode, capture_mode);
    return SUCCESS;
}

void begin_capture() {
    invalidated.store(false);
    capturing.store(true);
}

int end_capture() {
    capturing.store(false);
    return invalidated.load() ? CAPTURE_INVALIDATED : SUCCESS;
}

int current_device() {
    if (HIP) return device_of_ordinal(hip_ordinal);
    return context_stack.empty() ? -1 : device_of_ordinal(context_stack.back());
}

int retain_context(void** context, int ordinal) {
    if (device_of_ordinal(ordinal) < 0) return INVALID_DEVICE;
    *context = &contexts[ordinal];
    return SUCCESS;
}

int push_context(void* context) {
    const auto ordinal = static_cast<char*>(context) - contexts;
    if (ordinal < 0 || ordinal >= ordinals()) return INVALID_CONTEXT;
    context_stack.push_back(static_cast<int>(ordinal));
    return SUCCESS;
}

int pop_context(void** context) {
    if (context_stack.empty()) return INVALID_CONTEXT;
    if (context) *context = &contexts[context_stack.back()];
    context_stack.pop_back();
    return SUCCESS;
}

int set_ordinal(int ordinal) {
    if (device_of_ordinal(ordinal) < 0) return INVALID_DEVICE;
    hip_ordinal = ordinal;
    return SUCCESS;
}

int get_ordinal(int* ordinal) {
    *ordinal = hip_ordinal;
    return SUCCESS;
}

}  // namespace sim

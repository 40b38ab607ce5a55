#include "base/sigbus.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <mutex>

#include "base/check.h"

namespace kv {
namespace {

struct Escape {
    sigjmp_buf jump;
    const void* fault = nullptr;
};

// initial-exec: the handler must find it without the lazy allocation that thread-local storage of a loaded library
// may need.
__attribute__((tls_model("initial-exec"))) thread_local Escape* escape = nullptr;

struct sigaction previous;

void pass_on(int signal, siginfo_t* info, void* context) {
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
        previous.sa_sigaction(signal, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signal);
    } else {
        // Returning repeats the access, which now ends the process as it would have without us.
        ::sigaction(SIGBUS, &previous, nullptr);
        if (info->si_code <= 0) ::raise(SIGBUS);  // sent by a process: nothing would repeat
    }
}

void on_sigbus(int signal, siginfo_t* info, void* context) {
    Escape* const here = escape;
    if (here == nullptr) {
        pass_on(signal, info, context);
        return;
    }
    here->fault = info->si_addr;
    siglongjmp(here->jump, 1);
}

}  // namespace

void install_sigbus_guard() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = on_sigbus;
        // ONSTACK: Python may have set up an alternate stack for its fault handler.
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        if (::sigaction(SIGBUS, &action, &previous) != 0) throw_errno("sigaction for SIGBUS");
    });
}

const void* run_guarded(void (*function)(void*), void* argument) {
    KV_ASSERT(escape == nullptr);
    Escape here;
    // Saves the signal mask, because the handler runs with SIGBUS blocked and is left by a jump.
    if (sigsetjmp(here.jump, 1) == 0) {
        escape = &here;
        function(argument);
    }
    escape = nullptr;
    return here.fault;
}

}  // namespace kv

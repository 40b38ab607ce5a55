#include "base/named_thread.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace kv {

std::thread start_thread(const std::string& name, std::function<void()> body) {
    sigset_t all, before;
    sigfillset(&all);
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before);  // the new thread inherits it
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
}

}  // namespace kv

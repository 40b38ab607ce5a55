// Threads of the data plane: named for whoever looks with top, and deaf to signals.
//
// A signal for the process must reach the interpreter's main thread, which waits in poll() and would sleep on if
// another thread took it. Faults (SIGBUS and the like) always go to the thread that made them.

#pragma once

#include <functional>
#include <string>
#include <thread>

namespace kv {

// `name`: at most 15 characters reach the kernel.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace kv

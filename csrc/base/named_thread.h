// Threads of the data plane: they have names, for tools like top, and block signals.
//
// A signal for the process must reach the interpreter's main thread, which waits in poll() and would go on sleeping if
// another thread took the signal. Faults (SIGBUS and the like) always go to the thread that caused them.

#pragma once

#include <functional>
#include <string>
#include <thread>

namespace kv {

// `name`: at most 15 characters reach the kernel.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace kv

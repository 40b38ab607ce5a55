// Copies that survive the loss of their memory.
//
// A client can truncate the memory that it shares while we copy; the kernel then sends SIGBUS to the copying thread.
// run_guarded() turns that into a value. SIGBUS anywhere else goes to the handler that was installed before ours.

#pragma once

namespace kv {

// Installs the handler, once in the life of the process; it stays, because a later handler may have chained to it.
void install_sigbus_guard();

// Calls function(argument). nullptr = it returned; otherwise the address whose access raised SIGBUS, and the function
// was left there: it must own nothing that a destructor would have to free, and hold no lock.
const void* run_guarded(void (*function)(void*), void* argument);

}  // namespace kv

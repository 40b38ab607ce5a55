// A guard for copies whose memory may disappear.
//
// A client can truncate the memory that it shares while we copy; the kernel then sends SIGBUS to the copying thread.
// run_guarded() turns that into a value. SIGBUS anywhere else goes to the handler that was installed before ours.

#pragma once

namespace kv {

// Installs the handler once per process. It is never removed, because a later handler may have chained to it.
void install_sigbus_guard();

// Calls function(argument). Returns nullptr when it returned, otherwise the address whose access raised SIGBUS. In that
// case the function was left by a jump, so it must own nothing that a destructor would free, and hold no lock.
const void* run_guarded(void (*function)(void*), void* argument);

}  // namespace kv

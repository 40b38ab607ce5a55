"""A kernel that writes to an invalid address: afterwards every call in that context fails, as after a real bug."""

import ctypes
from collections.abc import Callable

KERNEL = b"""
.version 6.3
.target sm_75
.address_size 64

.visible .entry write_nowhere()
{
    .reg .u64 %nowhere;
    .reg .u32 %value;
    mov.u64 %nowhere, 16;
    mov.u32 %value, 1;
    st.global.u32 [%nowhere], %value;
    ret;
}
"""


def load(ordinal: int = 0) -> Callable[[], None]:
    """Loads the kernel into the device's primary context, and returns a function that launches it.

    Call it in the loading thread. Raises OSError if the driver refuses.
    """
    library = ctypes.CDLL("libcuda.so.1")
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        code = library[name](*arguments)
        if code != 0:
            raise OSError(f"{name}: {code}")

    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call("cuCtxPushCurrent_v2", context)
    call("cuModuleLoadData", ctypes.byref(module), KERNEL)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"write_nowhere")
    return lambda: call("cuLaunchKernel", function, *(1,) * 6, 0, None, None, None)

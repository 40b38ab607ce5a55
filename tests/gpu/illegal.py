"""A kernel that writes where nothing is: afterwards every call in that context fails, for good, as after a real bug."""

import ctypes

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


def write_nowhere(ordinal: int = 0) -> None:
    """In the context that this process shares with all users of the device's primary one. Enqueued, not waited for."""
    library = ctypes.CDLL("libcuda.so.1")
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    calls = (
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal),
        ("cuCtxPushCurrent_v2", context),
        ("cuModuleLoadData", ctypes.byref(module), KERNEL),
        ("cuModuleGetFunction", ctypes.byref(function), module, b"write_nowhere"),
        ("cuLaunchKernel", function, *(1,) * 6, 0, None, None, None),
    )
    for name, *arguments in calls:
        code = library[name](*arguments)
        if code != 0:
            raise OSError(f"{name}: {code}")

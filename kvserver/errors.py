"""Every error that kvserver raises on purpose, in three families.

KvError
 ├── RequestError    the client is wrong: the message says what was expected and what came
 ├── ResourceError   we are full or busy: the client recomputes
 ├── DeviceError     one job failed: its chunks are discarded, nothing else is touched
 └── ConfigError     the operator is wrong: `kvserver` prints it and exits 2
      └── NativeModuleError    the data plane cannot be loaded; an ImportError as well

Anything else that escapes is a bug and stops the process; the supervisor starts it again and engines run on
without a cache meanwhile. Expected outcomes (a miss, a shorter prefix) are values, never errors.
"""

from typing import ClassVar, Literal

Family = Literal["request", "resource", "device", "config"]


class KvError(Exception):
    """Base of the families. `code` is a stable short word for programs, the message is for people."""

    family: ClassVar[Family]

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # pickle makes a copy from these, in another process
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class RequestError(KvError):
    """The client sent something that it must not send."""

    family = "request"


class ResourceError(KvError):
    """A bound was reached: arena, table, queue. Nothing was changed."""

    family = "resource"


class DeviceError(KvError):
    """One job failed on its mover."""

    family = "device"


class ConfigError(KvError):
    """The configuration or the machine does not allow the server to start."""

    family = "config"


class NativeModuleError(ConfigError, ImportError):
    """kvserver._native is missing, or was built for another machine."""


FAMILIES: dict[str, type[KvError]] = {
    "request": RequestError,
    "resource": ResourceError,
    "device": DeviceError,
    "config": ConfigError,
}

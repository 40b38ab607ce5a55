"""The environment as /env shows it: all names, and the values that explain the process's behaviour.

A value is shown only when its name is known to hold no secret. A list of secret names would not have the name of the
next token.
"""

import re
from collections.abc import Mapping

HIDDEN = "(hidden)"
_TOLD = re.compile(
    r"(CUDA|HIP|HSA|ROCR|ROCM|GPU|AMD|NCCL|RCCL|OMP|PYTORCH|PYTHON|MALLOC|XDG|LC)_\w+|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|PATH|LANG|HOME|USER|LOGNAME|HOSTNAME|PWD|TZ|TMPDIR|INVOCATION_ID|JOURNAL_STREAM|VIRTUAL_ENV"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED|AUTH|COOKIE|SESSION", re.IGNORECASE)


def shown_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Every name in sorted order, with its value or HIDDEN."""
    return {name: environment[name] if _may_be_told(name) else HIDDEN for name in sorted(environment)}


def _may_be_told(name: str) -> bool:
    return _TOLD.fullmatch(name) is not None and _SECRET.search(name) is None

"""Errors of every family, as they are printed and as another process receives them."""

import pickle

import pytest

from kvserver.errors import FAMILIES, KvError, NativeModuleError
from kvserver.remote.store import StoreError

ERRORS: list[KvError] = [
    *(family("some-code", f"what a {name} error says") for name, family in FAMILIES.items()),
    NativeModuleError("native", "built for another machine"),
    StoreError("remote-down", "no answer", node="10.0.0.7:6379"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_that_another_process_receives_is_the_same(error: KvError) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert type(received) is type(error)
    assert vars(received) == vars(error)
    assert str(received) == str(error) == f"{error.code}: {error.message}"

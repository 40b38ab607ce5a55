"""/env: facts that explain a server's behaviour are shown, possible secrets are not."""

import pytest

from kvserver.brain.http.environment import HIDDEN, shown_environment


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CUDA_VISIBLE_DEVICES", True),
        ("HSA_ENABLE_IPC_MODE_LEGACY", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("PYTHONHASHSEED", True),
        ("LD_LIBRARY_PATH", True),
        ("KVSERVER_ADMIN_TOKEN", False),
        ("HF_TOKEN", False),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("PYTHON_KEYRING_BACKEND", False),
        ("CUDA_API_KEY", False),
        ("NCCL_AUTH", False),
        ("DATABASE_URL", False),
        ("HTTPS_PROXY", False),
        ("PATH_OF_SOMETHING", False),
        ("path", False),
    ],
)
def test_values_are_told_by_names_that_are_known_to_be_no_secret(name: str, told: bool) -> None:
    assert shown_environment({name: "value"}) == {name: "value" if told else HIDDEN}


def test_every_name_is_told_in_order() -> None:
    assert list(shown_environment({"TZ": "", "A": "1", "PATH": "/bin"})) == ["A", "PATH", "TZ"]

"""The prompts that the tests of the disk tier store."""

import pytest

from tests.process.disk.scene import the_stories
from tests.process.engine import Prompt


@pytest.fixture
def stories() -> list[Prompt]:
    return the_stories()

"""The flags of `kvserver replay`."""

from benchmarks.replay.__main__ import FLAGS
from benchmarks.replay.options import ReplayOptions
from kvserver.cli.main import option_value


def test_flags_repeat_the_defaults_of_the_options() -> None:
    defaults = ReplayOptions()
    for flag in FLAGS:
        if flag.name != "socket":
            assert option_value(ReplayOptions, flag.name, flag.default) == getattr(defaults, flag.name), flag.name

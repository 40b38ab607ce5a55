"""ATOM's request line: ATOM's own id, the milliseconds of a load, and a reason when nothing was asked."""

import logging
import re

import pytest

from tests.unit.atom.test_atom_scheduler import Desk, operation, sequence


def test_a_load_has_its_milliseconds_and_the_request_its_own_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atom.kvserver")
    desk = Desk(held=36)
    seq = sequence(50, name=77)
    assert desk.admit(seq, hbm=0)
    (load,) = desk.scheduler.step().retrieves
    desk.scheduler.ended(desk.scheduler.jobs.ended([operation(77, load.job)]), failed=(), gaps=())
    desk.scheduler.finished(seq)
    desk.scheduler.step()
    (line,) = [record.message for record in caplog.records if record.message.startswith("request=")]
    assert re.fullmatch(r"request=77 prompt=50 hbm=0 hit=36 loaded=36 load_ms=\d+\.\d stored=0", line)


def test_without_a_namespace_it_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atom.kvserver")
    desk = Desk(held=36)
    desk.scheduler._exchange.use_namespace(b"")
    seq = sequence(50)
    assert not desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 50
    assert desk.scheduler.step().requests == ()
    desk.scheduler.finished(seq)
    desk.scheduler.step()
    (line,) = [record.message for record in caplog.records if record.message.startswith("request=")]
    assert line.endswith(" loaded=0 stored=0 why=no-namespace")
    assert desk.server.asked == 0

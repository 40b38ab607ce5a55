"""ATOM's contract as of ffdf3bb and since its #2167, distinguished by inspection; any other is refused by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom import connector, versions
from kvserver.errors import RequestError
from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, config_of, prompt

MakeRig = Callable[..., Rig]
STANDIN = pytest.mark.skipif(bool(ATOM_DIR), reason="a checkout has one contract")
CONTRACTS = pytest.mark.parametrize("tells_of_release", [False, pytest.param(True, marks=STANDIN)])


@CONTRACTS
def test_blocks_of_a_finished_request_go_when_they_are_stored_and_are_loaded_again(
    make_rig: MakeRig, tells_of_release: bool
) -> None:
    rig = make_rig(tensor=2, tells_of_release=tells_of_release)
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("its end", lambda: seq.is_finished)
        assert rig.connector.should_defer_free(seq)
    rig.drain()
    assert seq.block_table == []
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert len(rig.loads()) == 1
    assert not rig.connector._half._lives


@CONTRACTS
def test_a_request_that_is_aborted_while_it_loads_is_forgotten_with_its_blocks(
    make_rig: MakeRig, tells_of_release: bool
) -> None:
    rig = make_rig(tells_of_release=tells_of_release)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("its load", rig.loads)
        rig.abort(seq)
        rig.step()
    rig.drain()
    assert seq.block_table == []
    assert not rig.connector._half._lives, "a request that has ended holds nothing here"


@CONTRACTS
def test_a_preempted_request_goes_on_and_is_stored(make_rig: MakeRig, tells_of_release: bool) -> None:
    rig = make_rig(shape=Shape(blocks=24), tells_of_release=tells_of_release, max_num_seqs=2)
    seqs = rig.run(prompt(1, 330), prompt(2, 330), max_tokens=90)
    assert rig.scheduler.preemptions > 0
    assert all(seq.is_finished for seq in seqs)
    rig.forget_hbm()
    rig.orders.clear()
    rig.run(prompt(1, 330), prompt(2, 330))
    assert len(rig.loads()) == 2


def start(config: Any) -> None:
    connector.KvServerScheduler(config)


def test_a_method_that_a_later_atom_demands_is_named_with_the_release() -> None:
    class Later(ABC):
        @abstractmethod
        def blocks_were_moved(self, seq: Any) -> None: ...

    class Half(connector.KvServerScheduler, Later):
        pass

    with pytest.raises(RequestError, match=r"ATOM .* in .*atom wants blocks_were_moved of a connector"):
        Half(config_of("/nowhere/kv.sock", Shape(), model="m"))


@pytest.mark.parametrize("field", [name for name in versions.CONFIG if name != "hf_config"])
def test_a_field_of_the_config_that_is_not_there_is_named_with_the_release(field: str) -> None:
    config = config_of("/nowhere/kv.sock", Shape(), model="m")
    delattr(config, field)
    with pytest.raises(RequestError, match=rf"ATOM .* has no {field} in its Config"):
        start(config)


def test_a_field_of_its_parts_that_is_not_there_is_named() -> None:
    config = config_of(
        "/nowhere/kv.sock",
        Shape(),
        model="m",
        parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_size=1),
    )
    with pytest.raises(RequestError, match="no pipeline_parallel_rank in its ParallelConfig"):
        start(config)
    config = config_of("/nowhere/kv.sock", Shape(), model="m", speculative_config=SimpleNamespace(method="mtp"))
    with pytest.raises(RequestError, match="no model in its SpeculativeConfig"):
        start(config)


@STANDIN
def test_a_sequence_without_a_field_costs_the_cache_and_not_the_engine(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    seq = rig.add(prompt(1, 300), max_tokens=2)
    del seq.multimodal_data
    rig.drain()
    assert seq.is_finished
    assert "has no multimodal_data in its Sequence" in caplog.text
    assert rig.orders == []

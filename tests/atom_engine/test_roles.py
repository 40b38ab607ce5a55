"""Two engines at one server: a load-only engine uses the chunks that a store-only engine has computed."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest

import kvclient.atom.scheduler
from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.rig import KVConnectorFactory, Rig, prompt

MakeRig = Callable[..., Rig]


def test_what_a_producer_has_stored_a_consumer_loads_and_neither_does_the_others_work(make_rig: MakeRig) -> None:
    prefill, decode = (make_rig(tensor=2, kv_role=role) for role in ("kv_producer", "kv_consumer"))
    decode.run(prompt(2, 300))
    assert decode.stored_tokens() == [], "who only loads stores nothing"
    for turn in range(2):
        prefill.forget_hbm()
        prefill.computed_tokens = 0
        prefill.run(prompt(1, 300))
        assert prefill.computed_tokens == 300, "who only stores loads nothing"
        assert prefill.stored_tokens() == ([(0, 288)] if turn == 0 else []), "what is held is not stored again"
        prefill.orders.clear()
    decode.computed_tokens = 0
    decode.run(prompt(1, 300))
    (load,) = decode.loads()
    assert (load.hbm_tokens, load.end_tokens) == (0, 288)
    assert decode.computed_tokens == 12
    assert decode.stored_tokens() == []
    assert prefill.loads() == []


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in has no multi; ATOM_DIR names a checkout that has")
def test_inside_of_multi_nothing_is_stored_nor_loaded_and_every_block_comes_back(make_rig: MakeRig) -> None:
    """ATOM's multi does not pass ends of transfers to the scheduler halves at this commit (A21).
    ATOM: multi_metadata_exposes_sub_meta_unpins.
    """
    rig = make_rig()
    config = copy.copy(rig.config)
    config.kv_transfer_config = {"kv_connector": "multi", "connectors": [rig.config.kv_transfer_config]}
    alone = rig.connector
    with mock.patch.object(kvclient.atom.scheduler, "NAMESPACE_WAIT_S", 0.0):
        multi = KVConnectorFactory.create_connector(config, role="scheduler")
    rig.scheduler.inner.kv_connector = rig.connector = multi
    rig.metadata_filter = lambda rank, metadata: metadata.metas[0]
    try:
        rig.run(prompt(1, 300), prompt(2, 200), max_tokens=3)
        rig.forget_hbm()
        rig.run(prompt(1, 300))
        assert rig.orders == []
    finally:
        multi._connectors[0]._half.close()
        rig.scheduler.inner.kv_connector = rig.connector = alone

"""Two engines at one server: what one that only stores has computed, one that only loads takes over."""

from collections.abc import Callable

from tests.atom_engine.rig import Rig, prompt

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

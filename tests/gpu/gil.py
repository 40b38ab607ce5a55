"""Transfers of an engine whose Python is blocked: a C call holds the GIL, as a collective or a compiler may."""

import time

from tests.device.simulated import Machine
from tests.gpu.report import Report
from tests.gpu.scene import MODES, PREPARED_S, Gpus, Scene
from tests.process.harness import until

HELD_S = 3
VERBS = ("begin_store", "begin_retrieve")


def gil_held(report: Report, machine: Gpus | Machine) -> None:
    """In each mode a store and a retrieve end at the server before any Python thread of the engine runs again."""
    with Scene(machine) as scene:
        for mode in MODES:
            with scene.worker(mode, f"holds-{mode}") as engine:
                engine.call("ready")
                for verb in VERBS:
                    seed = scene.fresh() if verb == "begin_store" else 1
                    with scene.watching(PREPARED_S) as copy_begins:  # from before: a copy may end in a millisecond
                        engine.begin("begin_and_hold_the_gil", verb, seed, scene.chunks, HELD_S)
                        met = copy_begins()
                    began = time.monotonic()
                    until("its job to end", lambda: scene.in_flight() == 0, HELD_S)
                    ended_s, held = time.monotonic() - began, not engine.has_answered()
                    done_before = engine.end()
                    outcome = engine.call("outcome")
                    wrong = engine.call("landed") if verb == "begin_retrieve" else engine.call("wrong")
                    report.check(
                        met and held and not done_before and not outcome["why"] and not wrong,
                        f"{mode} {verb[6:]}: ended within {ended_s * 1e3:.0f} ms, the GIL held: {held}, met while "
                        f"copying: {met}, why={outcome['why']!r}, {wrong} wrong bytes",
                    )
            scene.wait_alone()

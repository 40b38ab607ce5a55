"""Parent, child and grandchild by spawn, like server, EngineCore and ModelRunner.

Each imports ATOM's factory, and prints whether it knows "kvserver".
"""

import multiprocessing


def say(generation: int) -> None:
    from atom.kv_transfer.disaggregation.factory import KVConnectorFactory  # noqa: PLC0415  (as ATOM does: late)

    try:
        known = KVConnectorFactory.canonical_name("kvserver")
    except ValueError as problem:
        known = str(problem)
    print(generation, known, flush=True)
    if generation < 2:
        process = multiprocessing.get_context("spawn").Process(target=say, args=(generation + 1,))
        process.start()
        process.join()


def main() -> None:
    say(0)


if __name__ == "__main__":
    main()

"""How late does an engine get what an engine of another server computes, with a store between the two servers?

python -m benchmarks.bench_foretold [--rounds 6] [--store valkey|directory] [--json] [--smoke]

Two servers and a store on this machine, small chunks. In each round one engine pledges a prompt and stores it chunk by
chunk; an engine of the other server awaits it. first_word: from the pledge until a lookup of the other engine, which
asks every 5 ms, says that the prompt comes. chunk: from the call that stores a chunk until its bytes are in the other
engine's blocks, looked at every 3 ms. local: the same for an engine of the first server, in rounds of its own. The
first round is left out: it is the first of which the other server hears.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.rows import Rows, option_parser
from tests.process.engine import Engine, Waiting, prompt
from tests.process.harness import Server, until
from tests.process.worker import Worker
from tests.rigs.valkey_server import ValkeyServer

CHUNKS = 7
ASK_S, LOOK_S = 0.005, 0.003
WITHIN_S = 30


@contextmanager
def store_url(kind: str) -> Iterator[str]:
    if kind == "directory":
        with tempfile.TemporaryDirectory(prefix="kv-bench-") as directory:
            yield f"file://{directory}"
    else:
        with ValkeyServer() as valkey:
            yield f"valkey://127.0.0.1:{valkey.port}"


def server_at(url: str) -> Server:
    return Server(remotes=f"fleet={url}?tokens_min=0&pledged=write")


def hears(server: Server) -> bool:
    """The server has read what others tell of the engines' namespace."""
    remote = server.status().remote
    return remote is not None and remote.namespaces_heard == 1


def one_round(worker: Worker, engine: Engine, seed: int) -> tuple[float, list[float]]:
    """Seconds until the first word, and for each chunk."""
    story = prompt(seed, CHUNKS)
    began_s = time.monotonic()
    worker.call("pledge", seed, CHUNKS)
    found = engine.client.lookup(engine.namespace, story.keys, may_wait=True)
    while not found.awaited:
        assert time.monotonic() - began_s < WITHIN_S, "nothing was foretold"
        time.sleep(ASK_S)
        found = engine.client.lookup(engine.namespace, story.keys, may_wait=True)
    first_word_s = time.monotonic() - began_s
    waiting = Waiting(engine, story)
    assert found.lease is not None
    engine.client.release(found.lease)
    chunks_s = []
    for chunk in range(CHUNKS):
        began_s = time.monotonic()
        worker.call("store_piece", seed, chunk, chunk + 1)
        while not waiting.has(chunk + 1):
            assert time.monotonic() - began_s < WITHIN_S, f"chunk {chunk} has not come"
            time.sleep(LOOK_S)
        chunks_s.append(time.monotonic() - began_s)
    assert waiting.end().ok
    return first_word_s, chunks_s


def main() -> None:
    parser = option_parser(__doc__, smoke="one round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--store", choices=("valkey", "directory"), default="valkey")
    given = parser.parse_args()
    rounds = 1 if given.smoke else given.rounds
    with ExitStack() as stack:
        url = stack.enter_context(store_url(given.store))
        one, other = (stack.enter_context(server_at(url)) for _ in range(2))
        worker = stack.enter_context(Worker(one.path, name="prefill"))
        worker.call("ready")
        far = stack.enter_context(Engine(other.path, name="decode").ready())
        near = stack.enter_context(Engine(one.path, name="decode").ready())
        for server in (one, other):
            until("what others tell to be heard", lambda server=server: hears(server))  # type: ignore[misc]
        one_round(worker, far, 1)
        far_rounds, near_rounds = [], []
        for number in range(rounds):
            far_rounds.append(one_round(worker, far, 2 + 2 * number))
            near_rounds.append(one_round(worker, near, 3 + 2 * number))
    rows = Rows("foretold", as_json=given.json, config=f"{given.store}, prompts of {CHUNKS} chunks")
    for name, measured in (("", far_rounds), ("local ", near_rounds)):
        rows.add(f"{name}first_word", [word_s * 1e3 for word_s, _ in measured], "ms")
        rows.add(f"{name}chunk", [chunk_s * 1e3 for _, chunks_s in measured for chunk_s in chunks_s], "ms")


if __name__ == "__main__":
    main()

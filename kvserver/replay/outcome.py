"""What became of one request: the message a worker sends when it has ended, and all that the result is summed from."""

import msgspec


class Outcome(msgspec.Struct, array_like=True, kw_only=True):
    """hbm_tokens + retrieved_tokens + computed_tokens are the prompt, exactly."""

    index: int
    worker: int
    prompt_tokens: int
    hbm_tokens: int = 0
    retrieved_tokens: int = 0
    foreign_tokens: int = 0
    """Of retrieved_tokens: those of chunks that this worker never sent in a store, so another one must have."""
    disk_tokens: int = 0
    """Of retrieved_tokens: those that had to be read from disk first."""
    computed_tokens: int = 0
    lookup_ns: int = 0
    """0 when the prompt has no whole chunk to ask for."""
    lookup_problem: str = ""
    """Why the server could not be asked; that is a miss."""
    retrieve_asked_bytes: int = 0
    """0 when there was nothing to retrieve."""
    retrieve_began_ns: int = 0
    retrieve_ended_ns: int = 0
    """From the call to its reply, on the clock that all processes of a machine share."""
    retrieve_problem: str = ""
    """Why what the lookup promised had to be computed after all; empty when it came."""
    compared_bytes: int = 0
    """Retrieved bytes that were compared: all of them."""
    wrong_bytes: int = 0
    spot_bytes: int = 0
    """Bytes of blocks that were in HBM already and were compared by chance."""
    spot_wrong_bytes: int = 0
    store_chunks_asked: int = 0
    store_chunks_held: int = 0
    store_bytes: int = 0
    store_began_ns: int = 0
    store_ended_ns: int = 0
    store_why: str = ""
    """Why store_chunks_held is less than asked."""

"""The outcome of one request: a worker's message when it has ended, and the only input of the result."""

import msgspec


class Outcome(msgspec.Struct, array_like=True, kw_only=True):
    """One request's outcome. hbm_tokens + retrieved_tokens + computed_tokens == prompt_tokens."""

    index: int
    worker: int
    prompt_tokens: int
    hbm_tokens: int = 0
    retrieved_tokens: int = 0
    foreign_tokens: int = 0
    """Part of retrieved_tokens from chunks that this worker never sent in a store, so another worker must have."""
    disk_tokens: int = 0
    """Part of retrieved_tokens that had to be read from disk first."""
    computed_tokens: int = 0
    lookup_ns: int = 0
    """0 if the prompt has no whole chunk to ask for."""
    lookup_problem: str = ""
    """Why the server could not be asked; that is a miss."""
    retrieve_asked_bytes: int = 0
    """0 if there was nothing to retrieve."""
    retrieve_began_ns: int = 0
    retrieve_ended_ns: int = 0
    """From the call to its reply, on the clock that all processes of a machine share."""
    retrieve_problem: str = ""
    """Why a promised prefix had to be computed after all; empty if it was retrieved."""
    compared_bytes: int = 0
    """Retrieved bytes that were compared: all of them."""
    wrong_bytes: int = 0
    spot_bytes: int = 0
    """Bytes of randomly checked blocks that were already in HBM."""
    spot_wrong_bytes: int = 0
    store_chunks_asked: int = 0
    store_chunks_held: int = 0
    store_bytes: int = 0
    store_began_ns: int = 0
    store_ended_ns: int = 0
    store_why: str = ""
    """Why store_chunks_held is less than asked."""

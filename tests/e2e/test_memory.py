"""The KV memory of a CPU engine, made without an engine."""

import os

import torch

from kvclient.vllm_memory import SharedZeros

BYTES = (3 << 20) + 4097


def test_the_pool_has_its_pages_before_the_first_request() -> None:
    """Of torch.zeros() as well: a request that is the first to use a block would pay for its pages."""
    with SharedZeros() as zeros:
        pool = torch.zeros(BYTES, dtype=torch.int8)
    assert os.fstat(zeros.descriptor).st_blocks * 512 >= BYTES  # before anything reads it, which makes pages as well
    assert zeros.bytes == pool.nbytes == BYTES
    assert not pool.any()
    zeros.close()

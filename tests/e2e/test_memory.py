"""The KV memory of a CPU engine, tested without an engine."""

import os

import torch

from kvclient.vllm.memory import SharedZeros

BYTES = (3 << 20) + 4097


def test_the_pool_has_its_pages_before_the_first_request() -> None:
    """Memory of torch.zeros() is populated too: else the first request to use a block pays for its page faults."""
    with SharedZeros([BYTES]) as zeros:
        pool = torch.zeros(BYTES, dtype=torch.int8)
    descriptor, bytes_ = zeros.made[pool.untyped_storage().data_ptr()]
    assert os.fstat(descriptor).st_blocks * 512 >= BYTES  # read first: reading the pool would also populate pages
    assert bytes_ == pool.nbytes == BYTES
    assert not pool.any()
    os.close(descriptor)


def test_each_allocation_of_the_cache_is_shared_once_and_nothing_else_is() -> None:
    """Releases before 0.29 allocate more than once."""
    with SharedZeros([4097, 4097, 12_289]) as zeros:
        cache = [torch.zeros(size, dtype=torch.int8) for size in (4097, 12_289, 4097)]
        others = [
            torch.zeros(4097, dtype=torch.int8),
            torch.zeros(5000, dtype=torch.int8),
            torch.zeros((3, 4097), dtype=torch.int8),
            torch.zeros(12_289),
        ]
    assert list(zeros.made) == [tensor.data_ptr() for tensor in cache]
    assert not {tensor.data_ptr() for tensor in others} & set(zeros.made)
    for tensor in cache:
        tensor[4000] = 7
        descriptor, _ = zeros.made[tensor.data_ptr()]
        assert os.pread(descriptor, 1, 4000) == b"\x07"
        os.close(descriptor)

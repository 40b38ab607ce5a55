"""A simulator for kvclient.offload: a model engine and a model server around the real decisions, one run per seed.

    python -m tests.offload_sim --seeds 1000        runs seeds; a failing one is printed and can be run again
    python -m tests.offload_sim.drill               deliberate bugs, one by one: who notices?

Bytes are a function of the token prefix (content.py), so every byte that is read, stored or retrieved can be
compared.
"""

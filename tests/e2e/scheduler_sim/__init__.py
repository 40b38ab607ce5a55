"""vLLM's own scheduler and both real halves of the connector, around a played model runner, client and server.

    python -m tests.e2e.scheduler_sim --seeds 1000      in the environment that has vLLM; a failing one can be run again
    python -m tests.e2e.scheduler_sim.drill --model FOLDER       deliberate bugs, one by one: who notices?

There is no model: the KV of a token is a digest of all tokens before it and of the weights, and every slot of every
block is held here. Whatever is computed behind, stored or loaded is compared with what it must be.

Met: sync and async scheduling; the block tables of both model runners; one rank, and two with vLLM's own aggregator;
full attention, windows and both; all roles; aborts, preemptions, pauses, resets with new weights, names used again;
loads that fail, stores that are cut short, leases that are lost, evictions, a server that restarts or is away; vLLM's
MultiConnector with another that brings what it likes, within a step or between steps, or fails to (--beside: in all
seeds).

Left out: speculation, states, pipeline parallelism, releases before 0.31; what a copy does to bytes (tests/device);
what a server does (tests/sim).
"""

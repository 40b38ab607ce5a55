"""vLLM's own scheduler and both real halves of the connector, around a simulated model runner, client and server.

    python -m tests.e2e.scheduler_sim --seeds 1000      in the environment that has vLLM; a failing one can be run again
    python -m tests.e2e.scheduler_sim.drill --model FOLDER       deliberate bugs, one by one: who notices?

There is no model. The KV of a token is a digest of the weights and all tokens before it, and this package holds
every slot of every block. All KV that is attended to, stored or loaded is compared with the right value.

Covered: sync and async scheduling; the block tables of both model runners; one rank, and two with vLLM's own
aggregator; full attention, windows and both; all roles; aborts, preemptions, pauses, resets with new weights, reused
request names; failed loads, short stores, lost leases, evictions, a server that restarts or is away; vLLM's
MultiConnector with another connector that loads within a step or between steps, or fails to (--beside: in all
seeds); prompts that other engines compute, stop computing or come late with, and what a proxy says of requests
(--awaits: in all seeds).

Not covered: speculation, states, pipeline parallelism, releases before 0.31; the bytes of copies (tests/device); the
server (tests/sim).
"""

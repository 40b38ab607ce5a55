"""Load for engines with an OpenAI endpoint. bench_vllm.py is the entry point.

asks.py       requests as values: prompts, requests, lines of them
workloads.py  drawn workloads: documents, chats, permutations, evicted prefixes, misses
recorded.py   the recorded workload: sessions of a trace, with the answers' own durations
ramp.py       when more users join
crowd.py      users that send and wait, for any endpoint
reply.py      content and times of a streamed answer
endpoint.py   HTTP
counters.py   /metrics, and the hit rates in it
model.py      folders of models with random or no weights
engines.py    arms: engines with and without a server, started here
rounds.py     arms in turn, and whether their answers agree
summary.py    figures of a round
report.py     the table, the rows, the files
"""

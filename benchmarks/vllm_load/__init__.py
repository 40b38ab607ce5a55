"""Load for engines behind an OpenAI endpoint. bench_vllm.py is the entrance.

asks.py       what is asked, as values: prompts, requests, lines of them
workloads.py  the workloads that are drawn: documents, chats, permutations, evicted prefixes, misses
recorded.py   the one that is recorded: sessions of a trace, on the clock of whoever answers
ramp.py       when more users join
crowd.py      users that send and wait, whoever answers
reply.py      what a streamed answer said, and when
endpoint.py   HTTP
counters.py   /metrics, and the hit rates in it
model.py      folders of models with random or no weights
engines.py    arms: engines with and without a server, started here
rounds.py     arms in turn, and whether they said the same
summary.py    figures of a round
report.py     the table, the rows, the files
chart.py      SVG
"""

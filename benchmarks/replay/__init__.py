"""`kvserver replay`: recorded traffic against a real server, with every retrieved byte compared.

trace (the recording) → workload (users, prompts, times) → schedule → worker processes (engine, pool, pages,
prefixes) → outcomes → result → report. Trace, workload, schedule, engine, pool and outcome are those of
`kvserver/sizing`. `run.run(ReplayOptions(...), progress)` runs a replay; `report.render(result)` prints the result.
"""

"""`kvserver replay`: recorded traffic against a real server, with every retrieved byte compared.

trace (the recording) → workload (users, prompts, times) → schedule → worker processes (engine, pool, pages,
prefixes) → outcomes → result → report. `run.run(ReplayOptions(...), progress)` runs it; `report.render(result)`
prints the result.
"""

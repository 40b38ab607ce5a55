"""`kvserver replay`: recorded traffic against a real server, with every byte that comes back compared.

trace (what was recorded) → workload (who asks what, when) → schedule → worker processes (engine, pool, pages, prefixes)
→ outcomes → result → report. `run.run(ReplayOptions(...), progress)` does it, `report.render(result)` tells of it.
"""

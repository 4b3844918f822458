"""Measured time: clocks, the cost model of a machine, budgets in latency."""

"""Benchmark cases. Each file has `run(workload) -> Measured`; `harness` has no model, so `run(shapes, repeats)`.

A comparison with peers calls the same functions.
"""

"""Benchmark cases. Each file has `run(workload) -> Measured`; a comparison with peers calls the same functions."""

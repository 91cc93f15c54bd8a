"""Benchmarks: what each part of jaxft does per second, against what the device could do at most."""

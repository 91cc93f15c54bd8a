"""`benchmarks/constrained.py` at a tiny shape. No test judges the speed."""

import pytest

import constrained


@pytest.mark.slow
def test_the_record_has_both_sides():
    record = constrained.measure("qwen3-50k", 600, steps=4, repeats=1)
    assert set(record["median"]) == {"free", "constrained"} and record["ratio"] > 0

"""`benchmarks/shapes.py`: lengths of answers."""

import statistics

import pytest

from shapes import even_lengths, heavy_tailed_lengths


def test_heavy_tailed_lengths_are_quantiles_in_the_order_of_a_seed():
    lengths = heavy_tailed_lengths(256, median=64, longest=1024)
    assert lengths == heavy_tailed_lengths(256, median=64, longest=1024) != heavy_tailed_lengths(256, 64, 1024, seed=1)
    assert sorted(lengths) == sorted(heavy_tailed_lengths(256, 64, 1024, seed=1)) != lengths
    assert len(lengths) == 256 and statistics.median(lengths) == 64 and max(lengths) == 1024 and min(lengths) >= 1


def test_even_lengths_have_their_mean():
    assert sum(even_lengths(1000, mean=32)) == pytest.approx(32_000, rel=0.05)

"""`benchmarks/compiled_run.py`: kernels, messages and least times of a program that is given by hand."""

import pytest

from compiled_run import collectives, least_seconds, lines, main
from decode_step import CompiledStep
from hlo import Collective, Kernel, Launch, Program
from hlo_text import Array
from jaxft.planning.compiler import Compiled
from jaxft.planning.targets import find_target

V5E = find_target("v5e-8")
NUMBERS = Array("s8", (10**8,))
STEP = Program((Launch("add", "fusion", (), 1, reads=(819 * 10**6,)),), ())
GRADIENT = Program(
    (
        Launch("dot", "dot", (), 10, flops=197 * 10**10, reads=(819 * 10**7,)),  # 0.1 s of either on a v5e
        Launch("splash", "custom-call", (), 2, kernels=(Kernel("tpu_custom_call", "splash", 2),)),
        # 7/8 of 8 GB over links of 200 GB/s: 0.035 s; twice 7/8 of 0.4 GB: 0.0035 s.
        Launch("gather", "all-gather", (), 10, collectives=(Collective("all-gather", (NUMBERS,) * 8, 8, 10),)),
        Launch("sum", "all-reduce", (), 1, collectives=(Collective("all-reduce", (NUMBERS,) * 4, 8, 1),)),
        Launch("send", "collective-permute", (), 1, collectives=(Collective("collective-permute", (NUMBERS,), 1, 1),)),
    ),
    (),
)


def test_least_times_follow_from_the_limits_of_the_chip():
    seconds = least_seconds(V5E, GRADIENT, GRADIENT.flops)
    assert seconds == pytest.approx({"arithmetic": 0.1, "memory": 0.1, "links": 0.0385})
    assert "links" not in least_seconds(V5E, STEP, 0)
    assert collectives(GRADIENT)["all-gather"] == (10, 8_000_000_000)


def test_a_program_is_told_in_lines():
    compiled = CompiledStep(Compiled(0, 0, 0, 0, 40.0), GRADIENT)
    text = "\n".join(lines("gradient", compiled, V5E, 197 * 10**11 // 4))
    assert "2.462e+13 flops, 81.9 GB moved, 24 launches, compiled in 40 s" in text
    assert "at least 125.0 ms, by arithmetic" in text
    assert "kernel splash: 2 times" in text and "all-gather: 10 times, 8,000.0 MB in all" in text


def test_what_is_missing_is_one_line(tmp_path, capsys):
    assert main(["--config-file", str(tmp_path / "run.yml"), "--target", "v5e-8"]) == 2
    said = capsys.readouterr().err
    assert "run.yml" in said and said.count("\n") <= 2

"""`benchmarks/cost.py`: least times of launches, and figures of the accelerator's suite that need no device."""

import pytest

from cost import REACHED, Cost, costs, main, times_text
from hlo import Kernel, Launch, Program
from jaxft.models.ceilings import CHIPS

H100 = REACHED["h100"]
BODY = "jit(gradient)/transpose(jvp(layers))/while/body/dot_general"


def test_a_launch_takes_its_bytes_or_its_operations_and_the_launch_itself():
    product = Launch("fusion", "fusion", (), 7, flops=72 * 10**9, reads=(28,), op_name=BODY)
    move = Launch("copy", "copy", (), 1, writes=(28 * 10**8,), op_name="jit(gradient)/jvp(head)/add")
    found = costs(Program((product, move), ()), H100, 0.0)
    assert [(cost.place, cost.kind, cost.times) for cost in found] == [("layers", "product", 7), ("head", "move", 1)]
    assert [cost.seconds for cost in found] == pytest.approx([7 * (1e-4 + 1.5e-6), 1e-3 + 1.5e-6])
    assert [cost.bytes for cost in found] == [7 * 28, 28 * 10**8]


def test_attention_takes_its_operations_and_does_not_read_all_pages():
    target = "__cudnn$fmhaSoftmaxBackward"
    kernel = Launch("bwd", "custom-call", (), 2, reads=(10,), kernels=(Kernel(target, "bwd", 2),))
    paged = kernel._replace(label="attend", reads=(50, 7), op_name="jit(f)/paged/attend")
    paged = paged._replace(kernels=(Kernel("triton", "attend", 2),))
    found = costs(Program((kernel, paged), ()), H100, 480e9, pool_bytes=100)
    assert [(cost.place, cost.kind, cost.bytes) for cost in found] == [
        ("rest", "attention", 20),
        ("rest", "attention", 14),
    ]
    assert [cost.seconds for cost in found] == pytest.approx([2 * (2.5e-3 + 1.5e-6), 2 * (1e-3 + 1.5e-6)])
    assert {cost.place for cost in costs(Program((kernel,), ()), H100, 1.0, name="step")} == {"step"}


def test_layers_count_as_often_as_there_are_layers():
    cost = Cost(Launch("copy", "copy", (), 2), "layers", "move", 0.1, 10, 4.0, 2)
    assert cost.scaled(7)[3:] == pytest.approx((0.7, 70, 28.0, 14))
    assert times_text([cost.scaled(7)]).endswith("calibrated 903.0")


def test_what_cannot_be_computed_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # as if this were the compilers' environment
    assert main(["--compiler", str(tmp_path / "bin" / "python"), "--target", "h100x3"]) == 2
    assert "h100x3" in capsys.readouterr().err
    assert set(REACHED) == set(CHIPS)

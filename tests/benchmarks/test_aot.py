"""`benchmarks/aot.py`: cases, bars and results, with a compiler that answers by rote."""

import json

import pytest

import aot
import aot_engine
from aot import CASES, Case, CaseResult, Results, case_text, lengths_text, main, measure, measure_lengths
from decode_step import CompiledStep
from hlo import Collective, Kernel, Launch, Program
from hlo_text import Array
from jaxft.models.layer_stack import REMATS
from jaxft.planning.compiler import Compiled, CompilerError

PROGRAM = Program(
    (
        Launch("dot", "dot", (), 1, flops=10**12, reads=(10**9,)),
        Launch("gather", "all-gather", (), 4, collectives=(Collective("all-gather", (Array("bf16", (8,)),), 8, 4),)),
        Launch("mha_forward", "custom-call", (), 2, kernels=(Kernel("triton", "mha_forward", 2),)),
    ),
    (),
)
SMALL = Case("h100x8", "qwen3-0.6b", 2, 1024, layers=2)


def answer(temporaries):
    """A compiler that needs this many bytes of temporaries, by checkpoint policy; None is out of memory."""

    def compile_case(case, remat):
        size = temporaries[remat]
        if size is None:
            raise CompilerError("RESOURCE_EXHAUSTED", is_out_of_memory=True)
        held = case.programs(remat).held()
        arguments = held["parameters"] + held["gradients"] + aot.batch_bytes(case.rows * case.width)
        return CompiledStep(Compiled(arguments, 0, size, 0, 1.0), PROGRAM)

    return compile_case


@pytest.mark.slow
def test_the_cases_are_those_of_both_platforms():
    assert {case.platform for case in CASES} == {"gpu", "tpu"}
    for case in CASES:
        rows, width = case.programs("dots").rows_and_width()
        assert (rows, width) == (case.rows * aot.find_target(case.target).chips, case.width)


def test_the_first_policy_that_fits_is_taken():
    limit = aot.memory_limit(aot.find_target("h100x8"))
    result = measure(
        SMALL, answer({"none": None, "dots": None, "projections": limit, "attention": 10**9, "full": 10**8})
    )
    assert result.remat == "attention"
    assert result.tried == {"none": None, "dots": None, "projections": limit, "attention": 10**9}
    assert result.memory["update"] == 10**9
    assert result.collectives == {"all-gather": (4, 64)} and result.kernels == {"mha_forward": 2}
    assert result.moved_bytes == 10**9 and result.flops > 10**12
    verdicts = {check.name: check.is_met() for check in result.checks}
    assert verdicts["memory / limit"] and verdicts["arguments beyond parameters, gradients and batch, relative"]
    assert "attention" in case_text(result) and "[reached] memory / limit" in case_text(result)
    assert CaseResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.slow
def test_what_fits_with_no_policy_is_a_bar_that_is_missed():
    limit = aot.memory_limit(aot.find_target("h100x8"))
    result = measure(SMALL, answer(dict.fromkeys(REMATS, limit)))
    assert result.remat == "least" and not result.checks[0].is_met()


def test_temporaries_that_grow_with_rows_are_a_bar_that_is_missed():
    def quadratic(case, remat):
        return answer({remat: case.rows * case.width**2})(case, remat)

    sizes, check = measure_lengths("gpu", (1024, 2048, 4096), quadratic)
    assert list(sizes) == [1024, 2048, 4096] and not check.is_met()
    assert "MISSED" in lengths_text(Results(compilers={}, environment={}, temporaries_by_length=sizes, checks=[check]))


def test_a_platform_is_gpu_or_tpu_and_compilers_are_wanted(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["npu"])
    assert main(["--compiler", str(tmp_path / "python")]) == 2
    assert "scripts/make_compilers.sh" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_results_in_the_repository_are_complete_and_reach_every_bar(platform):
    results = Results.model_validate(json.loads((aot.RESULTS / f"aot_{platform}.json").read_text()))
    assert results.is_complete
    assert [case.title for case in results.cases] == [case.title for case in CASES if case.platform == platform]
    checks = results.update_checks()
    if results.engine is not None:
        titles = [case.title for case in aot_engine.CASES if case.platform == platform]
        assert results.engine.is_complete and [step.title for step in results.engine.steps] == titles
        checks += results.engine.all_checks()
    assert [check.name for check in checks if not check.is_met()] == []

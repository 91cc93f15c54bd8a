"""`benchmarks/run.py`: every case runs at a tiny shape and reports its numbers. No test judges their speed."""

import json
import math

import pytest

from records import Results
from run import ON_CPU, ON_GPU, SUITES, Job, main, run_job
from shapes import TINY

RATIOS = (
    "time of 4 requests with one prompt / with a prompt each",
    "heavy-tailed: tokens/s of the engine / of lockstep",
    "tokens/s of four times the requests / of the requests once",
    "milliseconds per trivial episode",
)
"""Checks that depend on time, which means nothing at tiny shapes."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All cases, once each, as they were written to disk."""
    out = tmp_path_factory.mktemp("bench") / "folder" / "results.json"
    assert main(["--suite", "cpu", "--shrink", "--repeats", "2", "--out", str(out)]) == 0
    return Results.model_validate_json(out.read_text())


@pytest.fixture(scope="module")
def cases(results):
    return {case.case: case for case in results.cases}


@pytest.mark.long
def test_all_cases_are_in_the_file(results):
    assert results.is_complete and results.rates_at_end is not None
    assert tuple(case.case for case in results.cases) == ON_CPU
    assert {case.model for case in results.cases} == {"tiny", None}
    assert results.shapes["prompt_tokens"] == TINY.prompt_tokens
    assert {"jax", "jaxlib", "flax", "optax", "numpy", "python", "jaxft"} <= results.environment["versions"].keys()
    assert results.machine.cpu_count >= 1 and results.machine.cpu_name and results.machine.device_kind


@pytest.mark.long
def test_rates_are_the_better_of_start_and_end(results):
    start, end, best = results.rates_at_start, results.rates_at_end, results.rates()
    assert best.copy_bytes == max(start.copy_bytes, end.copy_bytes) > 0
    assert all(best.matmul_flops[dtype] >= end.matmul_flops[dtype] > 0 for dtype in ("float32", "bfloat16"))


@pytest.mark.long
def test_every_measurement_has_its_repeats_and_its_limit(results):
    rates = results.rates()
    for case in results.cases:
        for line in case.lines:
            assert len(line.seconds) == 2 and min(line.seconds) > 0
            median, slowest, fastest = line.per_second()
            assert slowest <= median <= fastest
            if case.case == "harness":
                assert line.against is None
                continue
            assert math.isclose(line.against.limit_seconds, sum(line.against.phase_seconds.values()))
            assert math.isclose(line.against.limit_seconds, line.compared(rates.of(case.dtype)).against.limit_seconds)
            assert line.against.share > 0 and line.against.flops_share > 0


@pytest.mark.long
def test_checks_that_do_not_depend_on_time_hold(results):
    checks = [check for case in results.cases for check in case.checks]
    assert {check.name for check in checks} >= set(RATIOS)
    structural = [check for check in checks if check.name not in RATIOS]
    missed = [check.name for check in structural if not check.is_met() and "compilations" not in check.name]
    assert len(structural) == 9 and missed == []


@pytest.mark.long
def test_measurements_of_each_case(cases):
    names = {case: [line.name for line in found.lines] for case, found in cases.items()}
    assert names["decode"] == ["1 row", "4 rows"]
    assert len(names["prefill"]) == 3 and len(names["rollout"]) == 6
    assert names["harness"] == ["trivial", "recorded", "group", "time-outs", "validated rows"]
    heavy = {line.name: line for line in cases["rollout"].lines}["heavy-tailed, engine"]
    assert (heavy.shape["requests"], heavy.shape["longest_tokens"]) == (8, 16)


@pytest.mark.long
def test_compilations_and_memory(cases):
    figures = cases["compile"].figures
    for program in ("generate", "engine", "logprobs", "update"):
        assert figures[f"{program}, cold: programs"] >= 1
        assert figures[f"{program}, cold: compile_seconds"] > 0
    assert figures["engine, afterwards: compilations"] == 0
    memory = cases["memory"].figures
    assert memory["optimizer_bytes"] == pytest.approx(2 * memory["parameters_bytes"], rel=0.01)
    assert memory["engine_cache_bytes, 4 slots of 24 tokens and prefix cache"] >= 4 * 24 * 512


def test_a_case_that_fails_is_reported(capsys):
    impossible = Job("decode", "no such model", "float32", TINY)
    found = run_job(impossible, repeats=1)
    assert "'no such model'" in found.error and "Traceback" in found.traceback
    assert "no such model" in capsys.readouterr().err


@pytest.mark.slow
def test_computing_in_bfloat16(tmp_path):
    out = tmp_path / "gpu.json"
    assert main(["decode", "--suite", "gpu", "--shrink", "--repeats", "1", "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert (case["case"], case["model"], case["dtype"]) == ("decode", "tiny", "bfloat16")


@pytest.mark.long
def test_the_suite_for_an_accelerator(tmp_path):
    out = tmp_path / "gpu.json"
    assert main(["--suite", "gpu", "--shrink", "--repeats", "1", "--out", str(out)]) == 0
    cases = {case.case: case for case in Results.model_validate_json(out.read_text()).cases}
    assert tuple(cases) == ON_GPU
    served = {check.name: check.is_met() for check in cases["serve"].checks}
    assert len(served) == 2 and all(served.values())
    (alike, mixed) = cases["serve"].lines
    assert (alike.unit, alike.amount, mixed.unit, mixed.shape["requests"]) == ("requests", 6, "tokens", 5)


@pytest.mark.long
def test_adapters_and_the_distance_of_the_sampler(tmp_path):
    out = tmp_path / "gpu.json"
    assert main(["lora", "logprobs", "--suite", "gpu", "--shrink", "--repeats", "1", "--out", str(out)]) == 0
    lora, logprobs = Results.model_validate_json(out.read_text()).cases
    assert all(check.is_met() for check in (*lora.checks, *logprobs.checks))


def test_unknown_cases_and_models_are_refused(capsys):
    assert main([]) == 2
    assert "--suite" in capsys.readouterr().err
    assert main(["decoding"]) == 2
    assert "'decoding'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["decode", "--model", "m3"])
    assert SUITES["gpu"].models == ("qwen3-0.6b",)


def test_no_case_begins_after_the_time(tmp_path, capsys):
    out = tmp_path / "results.json"
    assert main(["harness", "--shrink", "--repeats", "1", "--minutes", "1e-9", "--out", str(out)]) == 0
    results = Results.model_validate_json(out.read_text())
    assert (results.cases, results.left_out, results.is_complete) == ([], ["harness"], False)
    assert "harness" in capsys.readouterr().out

"""`benchmarks/aot_engine.py`: figures of whole models from few layers, bars and results, with a compiler by rote."""

import json
import sys
from dataclasses import replace

import pytest

import aot
import aot_engine
from aot_engine import (
    CASES,
    DECODE,
    MOST_BYTES,
    PREFILL,
    EngineCase,
    EngineResults,
    StepResult,
    attention_ratio,
    measure_fit,
    measure_step,
    measure_warm_up,
    pool_bytes,
    programs_of,
    rest_text,
    step_text,
    weights_bytes,
)
from decode_step import CompiledStep, LargeCopy, Step, StepLaunch
from hlo import Program
from jaxft.models.config import model_preset
from jaxft.planning.compiler import Compiled, CompilerError
from jaxft.planning.targets import find_target

SMALL, EIGHT_B = EngineCase("h200x1", "qwen3-0.6b", 8), EngineCase("h100x8", "qwen3-8b", 256)
COPY = LargeCopy("loop", "copy", "copy", "bf16[8]", 16)
SCALES = 28 * (16 + 8 - 2) * 128 * 2  # the norms' scales of all 24 heads of a layer, in place of the two
MIB, WEIGHTS = 2**20, 1_192_099_840 + SCALES  # bytes of Qwen3-0.6B in bfloat16


def layer_bytes(run):
    """The bytes of a layer's weights and, beside the layers, of head and logits, on each device."""
    target = find_target("h100x8" if run.policy.mesh else "h200x1")
    few, more = (programs_of(run._replace(model=replace(run.model, num_layers=n)), target) for n in (1, 2))
    inside = weights_bytes(more) - weights_bytes(few)
    return inside, weights_bytes(few) - inside + aot_engine.logits_bytes(few)


def answer(
    launches=10, factor=1.0, trips=8, copies=(), temporaries=20 * MIB, waits=0, kernel=1, beside=MIB, has_loop=True
):
    """A compiler whose layers have so many launches beside attention's, and move `factor` times what they must."""
    asked = []

    def compile_run(run, target, program, pool):
        asked.append((program, run.model.num_layers, pool))
        layers, (inside, outside) = run.model.num_layers, layer_bytes(run)
        steps = max(aot_engine.DISPATCH_TOKENS) // trips if trips else 1
        turn = [
            StepLaunch("product", "fusion", round(factor * inside), round(factor * inside), False, steps * layers),
            StepLaunch("norm", "fusion", MIB, 0, False, steps * layers * (launches - 1)),
            StepLaunch("paged_attention", "custom-call", beside, beside, True, steps * layers * kernel),
            StepLaunch("head", "fusion", round(factor * outside), round(factor * outside), False, steps),
            StepLaunch("conditional", "conditional", 0, 0, False, waits),
        ]
        compiled = Compiled(0, 0, layers * temporaries, 0, 1.0, 40.0)
        return CompiledStep(compiled, Program((), ()), Step(trips, turn) if has_loop else None, copies)

    compile_run.asked = asked
    return compile_run


def verdicts(step):
    return {check.name: check.is_met() for check in step.checks}


def test_the_cases_are_both_models_on_four_targets_at_both_sizes_and_one_chip():
    assert len(CASES) == 17 and {case.platform for case in CASES} == {"gpu", "tpu"}
    assert {case.slots for case in CASES} == set(MOST_BYTES)
    assert {case.run(2).policy.mesh.tensor for case in CASES if not case.target.endswith("1")} == {8}


def test_weights_and_pages_of_a_device():
    whole = programs_of(SMALL.run(), find_target("h200x1"))
    assert weights_bytes(whole) == WEIGHTS  # the embedding is the head
    assert pool_bytes(whole) == 8 * 8 * 4096 * 128 * 2
    shared = programs_of(EIGHT_B.run(), find_target("h100x8"))
    model = model_preset("qwen3-8b")
    parameters = shared.parameters() - model.vocab_size * model.hidden_size  # without the embedding
    assert weights_bytes(shared) == pytest.approx(parameters * 2 / 8, rel=1e-3)
    assert pool_bytes(shared) == 1 * 256 * 4096 * 128 * 2


@pytest.mark.parametrize("trips", [8, 4, None])
def test_figures_of_the_whole_model_follow_from_two_depths(trips):
    compile_run = answer(trips=trips)
    step = measure_step(SMALL, compile_run)
    pool = 8 * 8 * 4096 * 128 * 2
    assert compile_run.asked == [(DECODE, 2, pool), (DECODE, 4, pool)]
    assert step.far_bytes == pytest.approx(step.least_bytes, rel=1e-6)
    assert step.moved_bytes == step.far_bytes + 28 * 9 * MIB
    assert (step.weights_bytes, step.logits_bytes) == (WEIGHTS, 8 * 151936 * 4)
    assert step.launches == {"norm": 9, "product": 1, "paged_attention": 1}
    assert (step.outer_launches, step.attention) == ({"head": 1}, {"paged_attention": 1})
    assert all(verdicts(step).values()) and len(step.checks) == 5
    assert "11 launches a layer" in step_text(step)
    assert StepResult.model_validate_json(step.model_dump_json()) == step


@pytest.mark.parametrize(
    ("options", "missed"),
    [
        ({"factor": 1.31}, "bytes of a step / weights and logits"),
        ({"launches": 14}, "launches of a layer"),
        ({"copies": (COPY,)}, "large copies"),
        ({"waits": 1}, "launches that wait for the host"),
        ({"kernel": 0}, "kernels of attention in a layer"),
    ],
)
def test_a_bar_is_missed(options, missed):
    step = measure_step(SMALL, answer(**options))
    assert [name for name, is_met in verdicts(step).items() if not is_met] == [missed]
    assert "[MISSED] " + missed in step_text(step)


def test_prefill_has_a_bar_which_the_deeper_model_tells():
    compile_run = answer(temporaries=257 * MIB)  # of 4 layers: 1,028 MiB
    step = measure_step(EIGHT_B, compile_run)
    assert [each[:2] for each in compile_run.asked] == [(DECODE, 2), (DECODE, 4), (PREFILL, 4)]
    assert step.prefill_temporaries_bytes == 4 * 257 * MIB
    assert not verdicts(step)["bytes of prefill's temporaries"]
    assert verdicts(measure_step(EIGHT_B, answer(temporaries=256 * MIB)))["bytes of prefill's temporaries"]


def test_a_program_without_a_loop_is_an_error():
    with pytest.raises(CompilerError, match=r"qwen3-0.6b, h200x1"):
        measure_step(SMALL, answer(has_loop=False))


def test_attention_loads_little_beyond_the_pages_that_rows_hold():
    whole = programs_of(EIGHT_B.run(), find_target("h100x8"))
    held = 256 * 600 * 2 * 128 * 2  # keys and values of one head
    assert attention_ratio(whole, 0) == pytest.approx(1.066, abs=0.001)
    assert attention_ratio(whole, held / 10) == pytest.approx(1.166, abs=0.001)
    name = "bytes of attention / keys and values held"
    assert verdicts(measure_step(EIGHT_B, answer()))[name]
    assert not verdicts(measure_step(EIGHT_B, answer(beside=held // 10)))[name]


def test_compile_seconds_of_warm_up_add_up():
    seconds, check = measure_warm_up(SMALL, answer())
    prefills = {"prefill_8x64", "prefill_32x64", "prefill_128x64"}
    assert prefills | {"decode_8", "decode_filtered_shared_8"} < set(seconds) and len(seconds) == 11
    assert check.value == 40.0 * len(seconds)


@pytest.mark.slow
def test_requests_beside_training_have_the_memory_of_the_first_policy_that_fits():
    def compile_run(run, target, program, pool):
        assert run.policy.slots == 8 and run.lora is not None
        assert (program == "gradient") == (run.model.num_layers == 28)
        size = (
            {"none": None, "dots": None, "projections": 10**12}.get(run.policy.remat, 10**9)
            if program == "gradient"
            else 100 * MIB
        )
        if size is None:
            raise CompilerError("RESOURCE_EXHAUSTED", is_out_of_memory=True)
        return CompiledStep(Compiled(0, 0, size, 0, 1.0), Program((), ()))

    case = SMALL._replace(tokens=8 * 4096, lora=True)
    memory, check = measure_fit(case, compile_run)
    assert (memory["sampling temporaries"], memory["update"]) == (100 * MIB, 10**9)
    assert check.is_met() and case.title in check.name and "32,768" in check.name
    assert "GiB: " in rest_text(EngineResults(compilers={}, environment={}, fit_bytes=memory, checks=[check]))


CARRIED = "(s32[], bf16[8,4096,128]{2,1,0}, bf16[8,8]{1,0})"
LOOP = f"""HloModule decode

%condition (c: (s32[], bf16[8,4096,128], bf16[8,8])) -> pred[] {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %eight = s32[] constant(8)
  ROOT %lt = pred[] compare(%i, %eight), direction=LT
}}

%body (c: (s32[], bf16[8,4096,128], bf16[8,8])) -> (s32[], bf16[8,4096,128], bf16[8,8]) {{
  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %pages = bf16[8,4096,128]{{2,1,0}} get-tuple-element(%c), index=1
  %x = bf16[8,8]{{1,0}} get-tuple-element(%c), index=2
LAYERS
  %product = bf16[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = {CARRIED} tuple(%next, %pages, %product)
}}

ENTRY %main (p0: bf16[8,4096,128], p1: bf16[8,8]) -> bf16[8,8] {{
  %p0 = bf16[8,4096,128]{{2,1,0}} parameter(0)
  %p1 = bf16[8,8]{{1,0}} parameter(1)
  %zero = s32[] constant(0)
  %copy.1 = bf16[8,4096,128]{{2,1,0}} copy(%p0)
  %carried = {CARRIED} tuple(%zero, %copy.1, %p1)
  %while.1 = {CARRIED} while(%carried), condition=%condition, body=%body
  ROOT %out = bf16[8,8]{{1,0}} get-tuple-element(%while.1), index=2
}}
"""
"""A program that decodes on a v5e-8: it copies the pages, of eight times a key head, and reads them in each layer."""
LAYER = (
    '  %attend.{} = bf16[8,8]{{1,0}} custom-call(%x, %pages), custom_call_target="tpu_custom_call", '
    'metadata={{op_name="jit(decode)/attend/pallas_call"}}'
)

COMPILER = """#!{python}
import json, sys
from pathlib import Path
if "compile" not in sys.argv:
    print(json.dumps({{"jax": "0.10.2"}}))
else:
    request = json.load(sys.stdin)
    layers = [{layer!r}.format(n) for n in range(request["run"]["model"]["num_layers"])]
    Path(request["hlo_file"]).write_text({loop!r}.replace("LAYERS", "\\n".join(layers)))
    sizes = dict(arguments=0, outputs=0, temporaries=2**20, aliased=0, seconds=1.0, cpu_seconds=2.0)
    print(json.dumps(sizes))
"""


@pytest.mark.slow
def test_one_part_is_measured_and_the_other_stays_in_the_file(tmp_path, monkeypatch):
    """The compiler is a program that answers as `jaxft.planning.compiler` does."""
    monkeypatch.setattr(aot_engine, "CASES", (SMALL, EngineCase("v5e-8", "qwen3-0.6b", 8)))
    monkeypatch.setattr(aot_engine, "WARM_UPS", ())
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(COMPILER.format(python=sys.executable, layer=LAYER, loop=LOOP))
    python.chmod(0o755)
    file = tmp_path / "aot_tpu.json"
    length = {2048: 5}
    file.write_text(aot.Results(compilers={}, environment={}, temporaries_by_length=length).model_dump_json())
    command = ["--compiler", str(python), "--out", str(tmp_path)]
    assert aot.main(["tpu", "--only", "engine", *command]) == 1  # it copies
    results = aot.Results.model_validate(json.loads(file.read_text()))
    assert results.temporaries_by_length == length and results.engine.is_complete
    (step,) = results.engine.steps
    assert [each.label for each in step.copies] == ["copy"] and step.attention == {"attend": 1}

    monkeypatch.setattr(aot, "CASES", ())
    assert aot.main(["tpu", "--only", "updates", *command]) == 0
    again = aot.Results.model_validate(json.loads(file.read_text()))
    assert again.engine == results.engine
    assert again.temporaries_by_length == dict.fromkeys(aot.LENGTHS, 2**20)

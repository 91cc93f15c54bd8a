"""Plans by the command line, estimated, and the arithmetic of plans whose compiled figures are given by hand."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxft.cli import main
from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig, MeshConfig
from jaxft.components.programs import PlannedRun, run_from_json
from jaxft.models.config import model_preset
from jaxft.models.flash import PACKED_SINCE, Choice
from jaxft.planning import compiler
from jaxft.planning import plan as plan_module
from jaxft.planning.compiler import Compiled, apply_cudnn_limits
from jaxft.planning.plan import Plan, advice, lines
from jaxft.planning.targets import TARGETS, find_target
from jaxft.training import learner as learner_module

AGENT = """
import jaxft

class AgentConfig(jaxft.WorkflowConfig, name="planned_agent"):
    llm: jaxft.LLMRef

@jaxft.register_workflow(config_type=AgentConfig)
async def agent(config, builder):
    yield None

class BrevityConfig(jaxft.EvaluatorConfig, name="planned_brevity"):
    pass

@jaxft.register_evaluator(config_type=BrevityConfig)
async def brevity(config, builder):
    yield None
"""

RUN = """
imports: [planned]
llms:
  policy: {_type: local_policy, path: model, tokenizer: null, max_context_tokens: 2048, slots: 64,
           mesh: {data: 1, fsdp: -1}}
workflow: {_type: planned_agent, llm: policy}
eval:
  general: {dataset: {_type: jsonl, file_path: train.jsonl}}
  evaluators: {brevity: {_type: planned_brevity}}
trajectory_builders: {rollouts: {_type: grpo_trajectory_builder}}
trainer_adapters: {local: {_type: local_trainer_adapter, llm: policy, microbatch_tokens: 131072}}
trainers: {loop: {_type: grpo_trainer}}
finetuning:
  enabled: true
  trainer: loop
  trajectory_builder: rollouts
  trainer_adapter: local
  reward_function: {name: brevity}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration, and the shape of Qwen3-0.6B."""
    tmp_path = tmp_path_factory.mktemp("planned")
    (tmp_path / "planned.py").write_text(AGENT)
    (tmp_path / "run.yml").write_text(RUN)
    (tmp_path / "train.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def programs_made_once():
    """Plans of one run for one target share its programs, which are traced to be made, and whether a model can pack."""
    made, make = {}, plan_module.Programs
    packing, can_pack = {}, learner_module.can_pack

    def packs(model, params):
        if model not in packing:
            packing[model] = can_pack(model, params)
        return packing[model]

    def programs(*arguments):
        if repr(arguments) not in made:
            made[repr(arguments)] = make(*arguments)
        return made[repr(arguments)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "Programs", programs)
        patch.setattr(learner_module, "can_pack", packs)
        yield


@pytest.fixture
def planned(folder, monkeypatch):
    """Make the folder the working directory, without compilers in the user's cache."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


ONE = "llms.policy.remat=full"
"""A setting with which the programs of one checkpoint policy are traced, not of four."""


def plan(target, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return main(["plan", "--config-file", "run.yml", "--target", target, *options])


def test_a_plan_without_compilers_is_estimated(planned, capsys):
    assert plan("v5e-8") == 0
    shown = capsys.readouterr().out
    assert "scripts/make_compilers.sh" in shown and str(planned / "cache") in shown
    assert "v5e-8: 8 x TPU v5e; mesh data 1, fsdp 8, tensor 1 (estimated)" in shown
    assert "596.0 M parameters in float32, 596.0 M trained; products in bfloat16" in shown
    assert "64 rows of 2,048 tokens, on 8 chips" in shown
    # 596,049,920 float32 parameters over 8 chips; both moments of AdamW, and its count; sums of gradients.
    assert "   0.278 GiB  parameters\n" in shown and "   0.556 GiB  optimizer\n" in shown
    assert "   0.278 GiB  gradients\n" in shown
    assert "   1.750 GiB  sampling\n" in shown  # 64 x 2,048 tokens of 112 KiB over 8 chips
    assert "(estimated)" in shown and "(auto)" in shown
    # What the compiler for a v5e makes of 8 rows a chip, 1.18 and 421 ms, stands in docs/accelerators.md.
    assert "1.18 times the model's; at least 420.9 ms of arithmetic and 15.6 ms of links" in shown


def test_a_plan_for_many_hosts_says_what_is_sent(planned, capsys):
    assert plan("v5p-256", ONE, "llms.policy.mesh={data: 4, fsdp: 32}", "llms.policy.slots=128") == 0
    shown = capsys.readouterr().out
    assert "v5p-256: 128 x TPU v5p; mesh data 4, fsdp 32, tensor 1 (estimated)" in shown
    assert "32 hosts, with a process on each" in shown
    # 596,049,920 parameters of bfloat16: 31 of 32 parts, twice; gradients once, in their parts between 4 copies.
    assert "2,309.7 MB a chip for each microbatch along fsdp between hosts: weights, forward and backward" in shown
    assert "1,154.8 MB a chip for each microbatch along fsdp between hosts: parts of gradients" in shown
    assert "55.9 MB a chip for each microbatch along data between hosts: sums of gradients, at least 0.1 ms" in shown
    assert "1,154.8 MB a chip for each update along fsdp between hosts: weights to sample with" in shown


def test_adapters_have_a_base_of_bfloat16_and_few_messages(planned, capsys):
    assert plan("h200x16", ONE, "llms.policy.mesh={data: 2, fsdp: 8}", "llms.policy.lora.rank=16") == 0
    shown = capsys.readouterr().out
    assert "2 hosts, with a process on each" in shown
    assert "   1.110 GiB  gathered base\n" in shown  # whole on each chip, to sample with
    assert "parameters in bfloat16, 10.1 M trained; products in bfloat16" in shown
    # Messages within a host take its links. The frozen base is gathered, too: 606,141,440 parameters, 7 of 8 parts,
    # twice, at 450 GB/s.
    assert "2,121.5 MB a chip for each microbatch along fsdp: weights, forward and backward, at least 4.7 ms" in shown
    assert "2.5 MB a chip for each microbatch along data between hosts: sums of gradients, at least 0.1 ms" in shown


def test_a_sampler_that_holds_its_weights_needs_them_once_more(planned, capsys):
    assert plan("v5e-8", ONE, "trainers.loop.max_staleness=1") == 0
    shown = capsys.readouterr().out
    # 596,049,920 parameters of bfloat16, 1.110 GiB, gathered along fsdp: whole on each chip.
    assert "   1.110 GiB  held sampling weights\n" in shown
    # With partial rollouts a collection and its job take turns.
    assert plan("v5e-8", ONE, "trainers.loop.max_staleness=1", "trainers.loop.partial_rollout_tokens=256") == 0
    shown = capsys.readouterr().out
    assert "held sampling weights" not in shown and "   6.661 GiB  checkpoint\n" in shown  # without a copy of them


def test_a_snapshot_is_a_copy_in_the_dtype_of_products_with_its_own_cache(planned, capsys):
    assert plan("v5e-8", ONE, "llms.old={_type: local_policy, snapshot_of: policy, slots: 32}") == 0
    shown = capsys.readouterr().out
    assert "   0.139 GiB  snapshots\n" in shown  # 596,049,920 parameters of bfloat16 over 8 chips
    assert "   2.625 GiB  sampling\n" in shown  # and half as many slots as the policy's


@pytest.mark.parametrize(
    ("target", "settings", "code", "wanted"),
    [
        ("h300x1", [], 2, ["target is 'h300x1'", "h200x1 to h200x1024", "did you mean"]),
        ("v5e-7", [], 2, ["target is 'v5e-7'"]),
        ("h200x8", ["llms.policy.mesh.data=0"], 2, ["mesh is data 0 x fsdp -1"]),
        ("h200x8", ["llms.policy.mesh.tensor=3"], 2, ["mesh is data 1 x fsdp -1 x tensor 3", "8 devices"]),
        ("h200x1", ["llms.policy.path=absent/model"], 2, ["llms.policy", "absent/model"]),
        ("h200x8", ["llms.policy.sampler_mesh.data=1"], 2, ["llms.policy.sampler_mesh", "can be planned"]),
        ("v5e-1", ["llms.policy.mesh=null", ONE], 1, ["does not fit", "microbatch_tokens to 65536", "lora"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(planned, capsys, target, settings, code, wanted):
    assert plan(target, *settings) == code
    said = capsys.readouterr().err
    assert said.count("\n") <= 2 and "Traceback" not in said
    for part in wanted:
        assert part in said


def compile_with(interpreter, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return main(["plan", "--config-file", "run.yml", "--target", "v5e-8", "--compiler", str(interpreter), *options])


def answer_in_this_process(sizes):
    """Returns what stands in for `subprocess` beside the compilers: it answers as a process of `STUB` does."""

    def run(command, *, env, input="{}", **options):
        interpreter, *arguments = command
        assert arguments in (["-m", "jaxft.planning.compiler"], ["-m", "jaxft.planning.compiler", "compile"])
        assert env["JAX_PLATFORMS"] == "cpu" and env["PYTHONPATH"] == str(compiler.ROOT) and "XLA_FLAGS" not in env
        assert options == {"capture_output": True, "text": True}
        if not interpreter.endswith("python"):
            return subprocess.CompletedProcess(command, 1, "", "no module named jax\n")
        if interpreter == "nowhere/python":
            raise FileNotFoundError(2, "No such file or directory", interpreter)
        return subprocess.CompletedProcess(command, 0, json.dumps(answer(sizes, arguments, json.loads(input))), "")

    return SimpleNamespace(run=run)


def answer(sizes, arguments, request):
    """Return the output of an interpreter with compilers for a request, with the given temporaries of each program."""
    if arguments[-1] != "compile":
        return {"jax": "9.9"}
    size = sizes.get((request["program"], request["run"]["policy"]["remat"]), sizes.get(request["program"], 0))
    if isinstance(size, str):
        return {"error": size, "is_out_of_memory": "RESOURCE" in size}
    return {"arguments": 1, "outputs": 1, "temporaries": size, "aliased": 0, "seconds": 1.0}


def test_compilers_that_are_not_there_are_one_line(planned, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "subprocess", answer_in_this_process({}))
    for interpreter in ("nowhere/python", str(planned / "empty")):
        assert compile_with(interpreter) == 1
        said = capsys.readouterr().err
        assert interpreter in said and "scripts/make_compilers.sh" in said
    assert "no module named jax" in said


@pytest.mark.slow
def test_compilers_are_processes_of_an_interpreter(planned, capsys):
    assert compile_with("nowhere/python") == 1
    assert "nowhere/python" in capsys.readouterr().err
    (planned / "broken").write_text("#!/bin/sh\necho no module named jax >&2; exit 1\n")
    (planned / "python").write_text(f"#!{sys.executable}\n{STUB}")
    for name in ("broken", "python"):
        (planned / name).chmod(0o755)
    assert compile_with(planned / "broken") == 1
    assert "no module named jax" in capsys.readouterr().err
    assert compile_with(planned / "python", ONE) == 0
    assert "compiled with jax 9.9" in capsys.readouterr().out


STUB = """
import json, sys
if sys.argv[-1] != "compile":
    print(json.dumps({"jax": "9.9"}))
else:
    json.load(sys.stdin)
    print(json.dumps(dict(arguments=1, outputs=1, temporaries=1, aliased=0, seconds=1.0)))
"""


def test_every_target_has_a_topology():
    for target in TARGETS.values():
        assert target.chips >= 1
        sides = target.topology.rpartition(":")[2].split("x")
        product = 1
        for side in sides:
            product *= int(side)
        assert product == target.chips or target.chips == 1


GRADIENT = Compiled(2**30, 2**29, 4 * 2**30, aliased=2**29, seconds=40.0)
STEP = GRADIENT._replace(temporaries=0)
RUN_OF_V5E = PlannedRun(
    LocalPolicyConfig(path="model", mesh=MeshConfig(data=1, fsdp=8)),
    LocalTrainerAdapterConfig(llm="policy", microbatch_tokens=131072),
    model_preset("qwen3-0.6b"),
)


def made_plan(**changes):
    gib = 2**30
    memory = {
        "parameters": gib, "optimizer": 2 * gib, "reference": 0, "gradients": gib, "update": 4 * gib,
        "sampling": 2 * gib, "sampling weights": gib, "sampling temporaries": gib,
    }  # fmt: skip
    made = Plan(
        target=find_target("v5e-8"),
        mesh={"data": 1, "fsdp": 8, "tensor": 1},
        remat="least",
        kernel=Choice("splash"),
        memory=memory,
        disk={"checkpoint": 3 * gib, "export": gib},
        limit=16 * gib,
        programs={"gradient": GRADIENT, "step": STEP},
        too_large=(),
        rows=64,
        width=2048,
        is_smallest=False,
        model_flops=197 * 10**11,  # 0.1 s on a v5e
        flops=197 * 10**11 * 5 // 4,
        parameters=596_049_920,
        trained_parameters=596_049_920,
        versions={"jax": "0.10.2"},
    )
    return made._replace(**changes)


def test_a_plan_is_told_in_lines():
    text = "\n".join(lines(made_plan(), RUN_OF_V5E))
    assert "compiled with jax 0.10.2" in text and "splash" in text
    assert "4.000 GiB  update\n" in text and "1.000 GiB  sampling temporaries (estimated)" in text  # prefill is missing
    assert "10.000 GiB  in all in the update, 62% of 16.00" in text
    assert "3.000 GiB  checkpoint\n" in text and "1.000 GiB  export\n" in text
    assert "7.000 GiB  in all in the rollout, 44% of 16.00" in text
    assert "arguments 1.000 GiB, temporaries 4.000, compiled in 40 s" in text
    assert "2.462e+13 flops a chip, 1.25 times the model's; at least 125.0 ms of arithmetic" in text
    # 596 M parameters of bfloat16 over links of 200 GB/s: 7/8 of them twice, and of their gradients once.
    assert "of arithmetic and 15.6 ms of links; at most 80% MFU" in text
    # Weights of 596 M numbers in bfloat16, then 2 GiB of pages, at 819 GB/s.
    assert "at least 1.5 ms for a token of each of 64 requests, by memory; 4.1 where every page is read" in text
    assert text.splitlines()[-1].startswith("fits: 62% of 16.00 GiB")
    assert "fits" not in "\n".join(lines(made_plan(limit=9 * 2**30), RUN_OF_V5E))  # the error says so
    hosts = "\n".join(lines(made_plan(target=find_target("v5e-16")), RUN_OF_V5E))
    assert "4 hosts, with a process on each" in hosts and "8 of the 16 chips" in hosts


def test_advice_begins_with_what_costs_least():
    small = made_plan(limit=9 * 2**30)
    assert not small.fits and made_plan().fits
    given = advice(small, RUN_OF_V5E)
    assert "1.00 GiB" in given[0] and "update" in given[0]
    assert "microbatch_tokens to 65536, worth up to 2.00 GiB" in given[1]
    assert "cache_tokens (now 32768)" in given[2] and "fsdp" not in " ".join(given)  # 8 of 8 already
    gpu = advice(small._replace(target=find_target("h100x8")), RUN_OF_V5E)
    assert "XLA_CLIENT_MEM_FRACTION=0.95" in gpu[1]
    smallest = " ".join(advice(small._replace(is_smallest=True), RUN_OF_V5E))
    assert "microbatch_tokens" not in smallest and "max_context_tokens (now 512)" in smallest
    assert "remat to least" in " ".join(advice(small._replace(remat="dots"), RUN_OF_V5E))
    assert "llms.policy.dtype to bfloat16, worth about 1.50 GiB" in " ".join(given)
    rollout = advice(small._replace(memory=small.memory | {"sampling temporaries": 20 * 2**30}), RUN_OF_V5E)
    assert "rollout" in rollout[0] and "cache_tokens" in rollout[1] and "remat" not in " ".join(rollout)


def test_a_mixture_is_planned_with_the_experts_that_a_chip_has():
    mixture = model_preset("qwen3-30b-a3b")
    made = made_plan(mesh={"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}, rows=16, parameters=30_532_122_624)
    made = made._replace(trained_parameters=made.parameters)
    text = "\n".join(lines(made, RUN_OF_V5E._replace(model=mixture)))
    # 48 layers have 28,991,029,248 weights of experts, of which a chip has a quarter, and 1,541,093,376 others; half of
    # the numbers come from the other chip along `fsdp`, twice.
    assert "17,577.7 MB a chip for each microbatch along fsdp: weights, forward and backward" in text
    assert "2,311.6 MB a chip for each microbatch along expert: sums of gradients" in text
    # 2 rows of 2,048 tokens of 2,048 numbers come from three chips, and sums go to them, forward and backward.
    assert "9,663.7 MB a chip for each microbatch along expert: tokens for experts, and their sums" in text
    # 1,229,934,592 weights of attention, routers and head, and in each layer 31 of a chip's 32 experts, as 64 requests
    # ask for 126 of 128 if they choose evenly.
    assert "at least 20.1 ms for a token of each of 64 requests" in text
    rollout = made._replace(memory=made.memory | {"sampling weights": 20 * 2**30}, limit=16 * 2**30)
    assert "double llms.policy.mesh.expert" in " ".join(advice(rollout, RUN_OF_V5E._replace(model=mixture)))


LARGE = "llms.policy.cache_tokens=262144"
"""A setting with which `dots` does not fit."""


@pytest.mark.parametrize(
    ("sizes", "settings", "code", "wanted"),
    [
        ({"gradient": 2**33}, [LARGE], 0, ["projections (auto)", "8.000 GiB  update\n", "compiled with jax 9.9"]),
        ({("gradient", "projections"): "RESOURCE_EXHAUSTED", "gradient": 2**32}, [LARGE], 0, ["attention (auto)"]),
        (
            {("gradient", "projections"): 2**34, "gradient": 2**32},
            [LARGE],
            0,
            ["attention (auto)", "4.000 GiB  update"],
        ),
        (
            {"gradient": "RESOURCE_EXHAUSTED"},
            [],
            1,
            ["least (auto)", "gradient ", "update (estimated)", "does not fit"],
        ),
        ({"prefill": "RESOURCE_EXHAUSTED"}, [], 1, ["does not fit", "prefill"]),
        ({"gradient": 2**33}, ["llms.policy.remat=dots"], 0, ["remat        dots\n"]),
        ({"step": "INTERNAL: no"}, [], 1, ["INTERNAL: no"]),
    ],
)
def test_the_first_checkpoint_policy_that_fits_is_planned(planned, capsys, monkeypatch, sizes, settings, code, wanted):
    monkeypatch.setattr(compiler, "subprocess", answer_in_this_process(sizes))
    compiler.versions.cache_clear()
    assert compile_with("python", *settings) == code
    shown = "".join(capsys.readouterr())
    for part in wanted:
        assert part in shown


def test_the_reference_is_planned_where_no_kernel_takes_attention(planned, capsys):
    assert plan("h100x8", ONE, "llms.policy.compute_dtype=float32") == 0
    shown = capsys.readouterr().out
    assert "reference implementation" in shown and "float32" in shown
    assert plan("h100x8", ONE) == 0
    packed = "cudnn" if jax.__version_info__ >= PACKED_SINCE else "pallas"
    assert f"{packed} kernel" in capsys.readouterr().out


def test_rows_with_a_window_have_a_kernel(planned, capsys):
    config = json.loads((planned / "model" / "config.json").read_text())
    (planned / "windowed").mkdir()
    config |= {"model_type": "mistral", "sliding_window": 512}
    (planned / "windowed" / "config.json").write_text(json.dumps(config))
    assert plan("h100x8", ONE, "llms.policy.path=windowed") == 0
    assert "cudnn kernel" in capsys.readouterr().out
    assert plan("v5e-8", ONE, "llms.policy.path=windowed") == 0
    assert "splash kernel" in capsys.readouterr().out


@pytest.mark.parametrize(("fraction", "limit"), [("0.5", "39.55"), ("1", "79.10")])
def test_the_limit_of_a_gpu_is_what_jax_takes(planned, capsys, monkeypatch, fraction, limit):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
    assert plan("h100x8", ONE) == 0
    assert f"of {limit}" in capsys.readouterr().out


def test_a_limit_that_is_no_number_is_one_line(planned, capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    assert plan("h100x8") == 2
    assert "'most'" in capsys.readouterr().err


def test_a_configuration_is_sent_as_it_is():
    taught = RUN_OF_V5E._replace(teacher=RUN_OF_V5E)
    assert run_from_json(json.loads(json.dumps(taught.to_json()))) == taught


def test_limits_of_cudnn_are_those_of_the_target():
    def reaches():
        return [fused_attention_stablehlo.check_compute_capability(wanted) for wanted in ("8.0", "9.0")]

    assert reaches() == [False, False]  # a CPU
    with apply_cudnn_limits(find_target("h200x1")):
        assert reaches() == [True, True]
    with apply_cudnn_limits(find_target("a100x8")):
        assert reaches() == [True, False]
    assert reaches() == [False, False]

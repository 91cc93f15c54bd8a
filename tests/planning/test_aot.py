"""Programs of an update as compilers for GPUs and TPUs make them, without a device: memory, messages and operations.

Models have the widths and the vocabulary of Qwen3, and few layers: those for TPUs are scanned, and those for GPUs one
like the other. `scripts/make_compilers.sh` gets the compilers.
"""

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import AbstractMesh

import roofline
from compiled_run import kernels
from decode_step import large_copies
from hlo import Launch, Program, read
from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.components.programs import PlannedRun, Programs
from jaxft.core.sharding import AXES
from jaxft.models.config import DecoderConfig, model_preset
from jaxft.models.flash import PACKED_SINCE
from jaxft.models.layer_stack import Remat
from jaxft.planning import compiler
from jaxft.planning.compiler import Compiled
from jaxft.planning.plan import estimate_update
from jaxft.planning.targets import find_target
from published import CONFIGS, published

INTERPRETER = compiler.default_interpreter()
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        not INTERPRETER.exists(), reason=f"no compilers are at {INTERPRETER}: {compiler.MAKE} gets them"
    ),
]
DOCS = Path(__file__).parents[2] / "docs" / "accelerators.md"


class Case(NamedTuple):
    """A program: a model on a mesh, and the microbatch of each device. 1,536 tokens are no width of a model's."""

    target: str
    model: str = "qwen3-0.6b"
    layers: int | None = 4  # None: all of the model's
    mesh: tuple[int, int, int] = (1, 8, 1)
    remat: Remat = "dots"
    rows: int = 4
    width: int = 1536
    loss: str = "grpo"
    lora: bool = False
    packing: bool | None = None
    compute_dtype: str = "auto"
    program: str = "gradient"
    teacher: str | None = None

    @property
    def config(self) -> DecoderConfig:
        config = published(self.model) if self.model in CONFIGS else model_preset(self.model)
        return config if self.layers is None else replace(config, num_layers=self.layers)

    @property
    def run(self) -> PlannedRun:
        shards = self.mesh[0] * self.mesh[1]
        policy: dict[str, Any] = {
            "path": self.model,
            "max_context_tokens": self.width,
            "compute_dtype": self.compute_dtype,
            "remat": self.remat,
            "mesh": None if math.prod(self.mesh) == 1 else dict(zip(AXES, self.mesh, strict=True)),
            "lora": {"rank": 16} if self.lora else None,
        }
        adapter: Any = {
            "llm": "policy",
            "loss": {"name": self.loss},
            "optimizer": {"learning_rate": 1e-6},
            "microbatch_tokens": self.rows * shards * self.width,
            "packing": self.packing,
        }
        if self.teacher is not None:
            adapter["loss"]["distillation"] = {"teacher": "teacher", "form": "reverse"}
        adapter = LocalTrainerAdapterConfig.model_validate(adapter)
        teacher = None
        if self.teacher is not None:
            config = self._replace(model=self.teacher).config
            teacher = PlannedRun(
                LocalPolicyConfig.model_validate(policy | {"path": self.teacher, "lora": None}), adapter, config
            )
        return PlannedRun(LocalPolicyConfig.model_validate(policy), adapter, self.config, teacher=teacher)

    @property
    def programs(self) -> Programs:
        return Programs(self.run, AbstractMesh(self.mesh, AXES), find_target(self.target).device)


@cache
def compiled(case: Case) -> tuple[Compiled, Program]:
    """Compile a program once per session; return its figures and the optimised HLO as it was read."""
    with tempfile.TemporaryDirectory() as folder:
        hlo = Path(folder) / "program.hlo"
        figures = compiler.compile_program(INTERPRETER, case.run, find_target(case.target), case.program, hlo)
        return figures, read(hlo.read_text())


GPU, TPU = Case("h100x8"), Case("v5e-8")
TENSOR = Case("h100x8", mesh=(1, 2, 4))
ONE_GPU = Case("h200x1", mesh=(1, 1, 1))
LORA = ONE_GPU._replace(lora=True)
EIGHT_B = GPU._replace(model="qwen3-8b", layers=2)
SHARDED = pytest.mark.parametrize("case", [GPU, TPU, TENSOR, EIGHT_B], ids=["gpu fsdp", "tpu fsdp", "gpu tensor", "8b"])
LOSSES = pytest.mark.parametrize(
    "case",
    [GPU, TPU, TENSOR, ONE_GPU, LORA, ONE_GPU._replace(loss="ppo"), ONE_GPU._replace(loss="dpo")],
    ids=["gpu fsdp", "tpu fsdp", "gpu tensor", "gpu", "lora", "ppo", "dpo"],
)


def shards(tree: Any) -> Counter[tuple[int, ...]]:
    """Count the shapes that leaves have on each device."""
    leaves = jax.tree.leaves(tree)
    return Counter(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape for leaf in leaves)


@pytest.mark.parametrize("case", [ONE_GPU, GPU], ids=["gpu", "gpu fsdp"])
def test_a_teacher_adds_its_forward_pass_and_a_chunk_of_logits(case):
    """Distillation over the whole vocabulary: half a chunk each, no table of all logits, and one gathered head."""
    (alone, one), (taught, both) = compiled(case), compiled(case._replace(teacher="qwen3-1.7b"))
    names = ("dot_product_attention_fwd", "dot_product_attention_bwd"), ("mha_forward", "mha_backward")
    forward, backward = names[0] if packs_by_cudnn() else names[1]
    assert kernels(both)[forward] == 2 * kernels(one)[forward] > 0
    assert kernels(both)[backward] == kernels(one)[backward] > 0
    assert taught.temporaries - alone.temporaries < 2**30
    head = 151936, 2048
    of_teacher = [(e.kind, e.times) for e in both.collectives if head in {array.shape for array in e.arrays}]
    assert of_teacher == ([] if case is ONE_GPU else [("all-gather", 1)])


@SHARDED
def test_arguments_of_a_gradient_are_shards_of_parameters_and_sums_and_the_rows(case):
    figures, hlo = compiled(case)
    is_shards_and_rows(case, figures, hlo, copies=2, held=("parameters", "gradients"))


@pytest.mark.parametrize("case", [GPU, TPU], ids=["gpu", "tpu"])
def test_arguments_of_a_step_are_shards_of_parameters_sums_and_moments(case):
    figures, hlo = compiled(case._replace(program="step"))
    is_shards_and_rows(case, figures, hlo, copies=4, held=("parameters", "gradients", "optimizer"))


def is_shards_and_rows(case: Case, figures: Compiled, hlo: Program, copies: int, held: tuple[str, ...]) -> None:
    """Assert that the arguments are `copies` of the parameters' shards, tables of the batch's rows, and scalars."""
    found = Counter(array.shape for array in hlo.arguments if array.shape and array.shape != (case.rows, case.width))
    assert found == Counter({shape: copies * count for shape, count in shards(case.programs.params).items()})
    exact = sum(array._replace(tiles="").bytes for array in hlo.arguments if array.shape in found)
    scalars = 4 * sum(array.dtype == "s32" for array in hlo.arguments if not array.shape)  # the optimizer's counters
    in_plan = sum(case.programs.held()[name] for name in held)
    assert exact <= in_plan <= exact + scalars
    assert figures.arguments == sum(array.bytes for array in hlo.arguments)  # on a TPU, padded to tiles


@SHARDED
def test_weights_are_gathered_in_bfloat16_and_layer_by_layer(case):
    _, hlo = compiled(case)
    gathered = [array for each in hlo.collectives if each.kind == "all-gather" for array in each.arrays]
    assert gathered and {array.dtype for array in gathered if math.prod(array.shape) > 2**16} == {"bf16"}
    stacks = {leaf.shape for leaf in jax.tree.leaves(case.programs.params["layers"]) if len(leaf.shape) == 3}
    assert len(stacks) >= 4 and not stacks & {array.shape for array in hlo.arrays}
    assert not stacks & {array.shape for each in hlo.collectives for array in each.arrays}


@LOSSES
def test_no_array_has_all_logits_or_all_scores(case):
    _, hlo = compiled(case)
    rows, width, vocabulary = case.rows, case.width, case.config.vocab_size
    for shape in {array.shape for array in hlo.arrays}:
        assert vocabulary not in shape or math.prod(shape) < rows * (width - 1) * vocabulary, shape
        assert shape.count(width) < 2, shape


@SHARDED
def test_head_and_embedding_are_gathered_once_and_their_gradients_exchanged_once(case):
    _, hlo = compiled(case)
    tensor = case.mesh[2]
    sizes = {case.config.vocab_size, case.config.vocab_size // tensor}
    chunks = case.rows * case.width * case.config.vocab_size / 2**27
    assert chunks > 4  # of logits
    times = Counter[str]()
    for each in hlo.collectives:
        if any(sizes & set(array.shape) for array in each.arrays):
            times["gathered" if each.kind == "all-gather" else "exchanged"] += each.times
    assert times["gathered"] <= 2 and times["exchanged"] <= 2 * (1 if tensor == 1 else 2), times


@LOSSES
def test_sums_of_gradients_are_written_in_place(case):
    figures, _ = compiled(case)
    assert figures.aliased >= case.programs.held()["gradients"] > 0
    assert figures.outputs - figures.aliased < 2**16


@LOSSES
def test_attention_is_that_of_the_kernels(case):
    layers = case.config.num_layers
    backward = "splash_mha_dkv_segmented_no_residuals", "splash_mha_dq_segmented_no_residuals"
    if find_target(case.target).chip.platform == "tpu":
        expected = ("splash_mha_fwd_segmented_residuals", *backward)
    elif case.loss == "dpo" or packs_by_cudnn():  # pairs are not packed
        expected = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    else:
        expected = "mha_forward", "mha_preprocess_backward", "mha_backward"
    assert attention_calls(compiled(case)[1]) == dict.fromkeys(expected, layers)


def packs_by_cudnn() -> bool:
    """True if the compilers' jax gives packed rows to cuDNN, False if to JAX's Triton kernel."""
    return tuple(map(int, compiler.versions(INTERPRETER)["jax"].split("."))) >= PACKED_SINCE


def attention_calls(program: Program) -> Counter[str]:
    """Count the calls of attention kernels; all of cuDNN's have a target of their own."""
    found = Counter[str]()
    for kernel in program.kernels:
        name = kernel.target if kernel.target.startswith("__cudnn") else kernel.name
        if "mha" in name:
            found[name] += kernel.times
    return found


def test_rows_of_one_sequence_take_cudnn():
    _, hlo = compiled(ONE_GPU._replace(packing=False))
    assert attention_calls(hlo) == {"__cudnn$fmhaSoftmax": 4, "__cudnn$fmhaSoftmaxBackward": 4}


def test_float32_takes_the_reference():
    _, hlo = compiled(ONE_GPU._replace(compute_dtype="float32", rows=1, layers=2))
    assert not attention_calls(hlo)


TURING = """
from jaxft.planning import compiler, targets
targets.HOPPER["major"] = "7 minor: 5"
compiler.main()
"""


def test_gpus_before_ampere_take_the_reference(monkeypatch):
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: run([command[0], "-c", TURING, command[-1]], **more))
    _, hlo = compiled.__wrapped__(ONE_GPU._replace(rows=1, layers=2))  # no other test may have it
    assert not attention_calls(hlo)


@pytest.mark.parametrize("case", [GPU, TPU, TENSOR], ids=["h100x8", "v5e-8", "tensor"])
def test_collectives_are_those_of_the_documentation(case):
    _, hlo = compiled(case)
    mesh = ", ".join(f"{name} {size}" for name, size in zip(AXES, case.mesh, strict=True) if size > 1)
    found = crossing(hlo, case.config.num_layers, case.config.intermediate_size)
    assert {of: documented(case.target, mesh, of) for of in found} == found


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def crossing(program: Program, layers: int, widest: int) -> dict[str, dict[str, float]]:
    """Return the MB of each kind of collective, of a layer and outside of layers; those below 0.1 are left out.

    Gradients of layers are sums of `widest` numbers at most in a dimension; their scatters have no scope.

    >>> crossing(Program((), ()), 4, 8)
    {'a layer': {}, 'the rest': {}}
    """
    found: dict[str, Counter[str]] = {"a layer": Counter(), "the rest": Counter()}
    for launch in program.launches:
        for each in launch.collectives:
            is_scatter = each.kind == "reduce-scatter" and max(max(array.shape) for array in each.arrays) <= widest
            is_of_layer = each.times % layers == 0 or is_in_layers(launch) or is_scatter
            of, share = ("a layer", layers) if is_of_layer else ("the rest", 1)
            found[of][each.kind] += each.times * each.bytes / share
    return {
        of: {kind: round(size / 1e6, 1) for kind, size in sizes.items() if size >= 1e5} for of, sizes in found.items()
    }


def is_in_layers(launch: Launch) -> bool:
    return re.search(r"\blayers\b", launch.op_name) is not None


def documented(target: str, mesh: str, of: str) -> dict[str, float]:
    """Return a row of the table of collectives in docs/accelerators.md."""
    (row,) = re.findall(rf"^\| {re.escape(target)}, {re.escape(mesh)} \| {of} \|(.*)\|$", DOCS.read_text(), re.M)
    cells = [cell.strip() for cell in row.split("|")]
    return {kind: float(cell.replace(",", "")) for kind, cell in zip(KINDS, cells, strict=True) if cell}


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (ONE_GPU._replace(layers=None, rows=8, width=2048), 1.12),
        (ONE_GPU._replace(layers=None, rows=8, width=2048, remat="full"), 1.4),
        (GPU._replace(model="qwen3-8b", layers=None, rows=1, width=4096), 1.05),
    ],
    ids=["0.6B dots", "0.6B full", "8B dots"],
)
def test_operations_are_little_more_than_those_of_the_model(case, most):
    _, hlo = compiled(case)
    config, tokens = case.config, case.rows * case.width
    seen = case.rows * roofline.tokens_seen(config.kinds, 1, case.width)
    attention = roofline.attention_flops(config, seen)
    needed = 6 * roofline.matmul_weights(config) * tokens + 3 * attention
    # A kernel's backward pass makes the scores once more: five products, where the forward pass has two.
    of_kernels = attention * (2 * (1 + (case.remat == "full")) + 5) / 2
    assert 1 < (hlo.flops + of_kernels) / needed <= most


def test_temporaries_are_linear_in_tokens():
    """The same tokens in rows that are longer take the same memory."""
    sizes = [compiled(ONE_GPU._replace(rows=8192 // width, width=width))[0].temporaries for width in (1024, 2048, 4096)]
    assert max(sizes) <= 1.02 * min(sizes), sizes


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 8, 1)], ids=["a chip", "fsdp"])
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_pages_are_not_copied_on_tpus_that_have_all_heads(mesh, program):
    case = Case("v5e-1" if math.prod(mesh) == 1 else "v5e-8", mesh=mesh, layers=2, program=program)
    figures, hlo = compiled(case)
    keys = case.programs.runner.cache_bytes(case.programs.compute_dtype) / (2 * 2)  # of a layer, on each chip
    copies = [each for each in large_copies(hlo, 1) if each.bytes > 0.5 * keys]
    assert copies == [] and figures.temporaries < 0.5 * keys
    assert hlo.kernels


def test_remat_least_scans_layers_of_gpus_and_keeps_no_exponentials():
    full, least = (
        compiled(ONE_GPU._replace(target="h100x1", rows=8, width=2048, packing=False, remat=remat))
        for remat in ("full", "least")
    )
    assert any(launch.loops for launch in least[1].launches if is_in_layers(launch))
    assert least[0].temporaries < 0.7 * full[0].temporaries


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_layers_of_gpus_are_unrolled_and_move_little(remat):
    """Only sums of gradients are stacks of all layers; a layer moves at most 3.6 GB beside its products and kernels."""
    case = ONE_GPU._replace(target="h100x1", rows=8, width=2048, packing=False, remat=remat)
    of_layers = [launch for launch in compiled(case)[1].launches if is_in_layers(launch)]
    assert of_layers and not any(launch.loops or "dynamic-update-slice" in launch.label for launch in of_layers)
    moves = [launch for launch in of_layers if not launch.flops and not any("fmha" in k.target for k in launch.kernels)]
    assert sum(launch.bytes for launch in moves) / 4 <= 3.6e9


def test_pages_that_rows_share_take_one_launch_more_a_layer_and_no_copy():
    (plain, hlo), (shared, other) = (
        compiled(ONE_GPU._replace(program=name)) for name in ("decode_8", "decode_shared_8")
    )
    layers, steps = ONE_GPU.layers, 8
    assert kernels(other) == {**kernels(hlo), "shared_paged_attention": layers * steps}
    first, second = (sum(launch.times for launch in each.launches) for each in (hlo, other))
    assert second - first == layers * steps
    keys = ONE_GPU.programs.runner.cache_bytes(ONE_GPU.programs.compute_dtype) / (2 * layers)
    assert large_copies(other, int(0.01 * keys)) == [] and shared.temporaries - plain.temporaries < 2**20


GEMMA = ONE_GPU._replace(model="gemma-3-1b", layers=20)  # three turns of six layers, and two layers


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_layers_of_several_kinds_are_not_copied_and_have_kernels_for_wide_heads(lora):
    """A layer is cut from the stack, in the backward pass again; no part of a base of adapters is copied as a stack."""
    case = GEMMA._replace(lora=lora)
    figures, hlo = compiled(case)
    assert attention_calls(hlo) == {"__cudnn$fmhaSoftmax": 20, "__cudnn$fmhaSoftmaxBackward": 20}
    hidden, wide = case.config.hidden_size, case.config.intermediate_size
    stacks = Counter(array.shape for array in hlo.arrays)
    assert not lora or not any(stacks[count, hidden, wide] for count in range(2, 21)), "the base is copied"
    assert figures.temporaries == pytest.approx(estimate_update(case.programs), rel=0.15)

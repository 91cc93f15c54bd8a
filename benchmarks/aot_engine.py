"""The engine's programs as compilers for GPUs and TPUs make them, without a device; `aot.py` calls this.

A step of decoding samples one token of every row. Its cases compile a model of few layers and one of more, which fix
the figures of every depth, as layers are alike. A TPU keeps weights inside the chip from step to step, as many as fit:
there both models are too large for that, or the larger one is whole. Bars, per device:

    bytes of a step, without attention's kernels, over weights and logits once: 1.15 at 256 rows, 1.3 at 8 rows; on GPUs
        arrays that stay in the cache are left out
    bytes of attention's kernels over the keys and values held: 1.15, for 256 rows of 600 tokens on average
    copies, concatenations, gathers and transposes of 1 % of the keys of a layer or more: none
    launches on GPUs: 14 a layer, and none that waits for the host
    temporaries of prefill: 0.2 GiB, Qwen3-8B 1 GiB
    CPU seconds to compile the programs of `warm_up`, Qwen3-0.6B on one device: 600
    Qwen3-8B on one H200: 256 requests that hold 1,200 tokens each fit beside the training of adapters
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh
from pydantic import BaseModel

from decode_step import CompiledStep, LargeCopy, Step
from jaxft.components.configs import LocalPolicyConfig, LocalTrainerAdapterConfig
from jaxft.components.programs import PlannedRun, Programs
from jaxft.core.cache import PAGE_TOKENS
from jaxft.core.sharding import AXES, device_bytes
from jaxft.models.config import model_preset
from jaxft.models.layer_stack import auto_remats
from jaxft.planning.compiler import CompilerError
from jaxft.planning.plan import MARGIN, estimate_update, memory_limit
from jaxft.planning.targets import Target, find_target
from jaxft.rollout.model_runner import DISPATCH_TOKENS
from jaxft.rollout.weights import WeightTransfer
from jaxft.training.memory import peak
from records import Check, check_text

GIB = 2**30
CONTEXT_TOKENS = 4096
MOST_BYTES = {8: 1.3, 256: 1.15}
"""Bytes of a step over those of weights and logits, by rows."""
MOST_ATTENTION_BYTES = 1.15
MOST_LAUNCHES = 14
MOST_PREFILL_BYTES = {"qwen3-0.6b": GIB // 5, "qwen3-8b": GIB}
MOST_COMPILE_SECONDS = 600
WAITS = ("conditional", "while")
"""Opcodes of launches after which a GPU waits for the host."""

Counts = Mapping[str, float]
"""Numbers of launches by label."""

Compile = Callable[[PlannedRun, Target, str, int], CompiledStep]
"""Compiles a program of a run for a target; the number is the `pool_bytes` of `compile_step`."""


class Depths(NamedTuple):
    """Numbers of layers of two models, between and beyond which figures lie on a straight line."""

    few: int
    more: int

    def at(self, values: Iterable[float], layers: int) -> float:
        """Return the value for a number of layers, given those of both models.

        >>> Depths(2, 4).at((10, 14), 28)  # 6 and 2 a layer
        62.0
        """
        few, more = values
        return few + (more - few) / (self.more - self.few) * (layers - self.few)

    def per_layer(self, few: Counts, more: Counts) -> tuple[Counts, Counts]:
        """Return what each label counts in a layer and outside of the layers; labels that count nothing are left out.

        >>> Depths(2, 4).per_layer({"dot": 9, "sample": 1}, {"dot": 17, "sample": 1})
        ({'dot': 4.0}, {'dot': 1.0, 'sample': 1.0})
        """
        labels = sorted(few.keys() | more.keys(), key=lambda label: -more.get(label, 0))
        outside = {label: self.at((few.get(label, 0), more.get(label, 0)), 0) for label in labels}
        inside = {label: (more.get(label, 0) - outside[label]) / self.more for label in labels}
        return _without_zeros(inside), _without_zeros(outside)


def _without_zeros(counts: Counts) -> Counts:
    return {label: count for label, count in counts.items() if count}


class EngineCase(NamedTuple):
    """Decoding on all chips of a target, whose heads are divided over them; `tokens` are those that requests hold."""

    target: str
    model: str
    slots: int
    tokens: int | None = None
    lora: bool = False

    @property
    def title(self) -> str:
        """The case in one line."""
        return f"{self.model}, {self.target}, {self.slots} rows"

    @property
    def platform(self) -> str:
        """The platform of the target: gpu or tpu."""
        return find_target(self.target).chip.platform

    @property
    def depths(self) -> Depths:
        """Layers of the two models that are compiled."""
        if self.platform == "gpu":
            return Depths(2, 4)
        return Depths(4, model_preset(self.model).num_layers if self.model == "qwen3-0.6b" else 8)

    def run(self, layers: int | None = None) -> PlannedRun:
        """Return the configuration of the case, by default with all layers of the model.

        >>> EngineCase("v5e-8", "qwen3-8b", 8).run(2).model.num_layers
        2
        """
        chips, model = find_target(self.target).chips, model_preset(self.model)
        policy = {
            "preset": self.model,
            "dtype": "bfloat16",
            "remat": "dots",
            "max_context_tokens": CONTEXT_TOKENS,
            "slots": self.slots,
            "mesh": {"data": 1, "fsdp": 1, "tensor": chips} if chips > 1 else None,
            "lora": {"rank": 16} if self.lora else None,
            "cache_tokens": self.tokens,
        }
        adapter = {"llm": "policy", "microbatch_tokens": 4 * CONTEXT_TOKENS, "optimizer": {"learning_rate": 1e-6}}
        return PlannedRun(
            LocalPolicyConfig.model_validate(policy),
            LocalTrainerAdapterConfig.model_validate(adapter),
            model if layers is None else replace(model, num_layers=layers),
        )


TARGETS = ("h200x1", "h100x8", "v5e-8", "v6e-8")
CASES = (
    *(
        EngineCase(target, model, slots)
        for target in TARGETS
        for model in ("qwen3-0.6b", "qwen3-8b")
        for slots in (8, 256)
    ),
    EngineCase("v5e-1", "qwen3-0.6b", 8),  # a chip with all heads
)
SHRUNK = (EngineCase("h200x1", "qwen3-0.6b", 8),)
WARM_UPS = (EngineCase("h200x1", "qwen3-0.6b", 256), EngineCase("v5e-1", "qwen3-0.6b", 8))
FIT_PAGES = math.ceil(256 * 1200 / PAGE_TOKENS) + 256
"""Pages of 256 requests that hold 1,200 tokens on average, and one to spare for each."""
FIT = EngineCase("h200x1", "qwen3-8b", 256, tokens=FIT_PAGES * PAGE_TOKENS, lora=True)


class StepResult(BaseModel):
    """Figures of a step of decoding, per device, of the whole model unless they say otherwise.

    Attributes:
        trips: turns of the loop that decodes, if the program says so.
        moved_bytes: bytes of device memory read and written outside of attention's kernels.
        far_bytes: the same, less arrays that stay in a GPU's cache.
        weights_bytes, logits_bytes: bytes that a step cannot do without.
        launches: launches of a layer, by label.
        outer_launches: launches of a step outside of its layers, by label.
        waits: launches of a step after which a GPU waits for the host.
        attention: kernels that take the keys of a layer, and how often a layer calls them.
        attention_bytes: bytes that they read and write in a layer beside the pages.
        copies: large copies of the larger program.
        decode_temporaries_bytes, prefill_temporaries_bytes: temporaries; of prefill None where it was not compiled.
        compile_seconds: seconds of the compiler for each program.
    """

    title: str
    trips: int | None
    moved_bytes: int
    far_bytes: int
    weights_bytes: int
    logits_bytes: int
    launches: Counts
    outer_launches: Counts
    waits: int
    attention: Counts
    attention_bytes: int
    copies: list[LargeCopy]
    decode_temporaries_bytes: int
    prefill_temporaries_bytes: int | None
    compile_seconds: list[float]
    checks: list[Check]

    @property
    def least_bytes(self) -> int:
        """Bytes of weights and logits."""
        return self.weights_bytes + self.logits_bytes


class EngineResults(BaseModel):
    """Results for one platform.

    Attributes:
        compilers: versions of jax and of the compilers.
        environment: versions, platform, command line and commit.
        warm_up_seconds: CPU seconds to compile each program that `warm_up` runs.
        fit_bytes: bytes by purpose of 256 requests beside the training of adapters; empty where it was not asked for.
        checks: bars beside those of the steps.
    """

    compilers: dict[str, str]
    environment: dict[str, Any]
    steps: list[StepResult] = []
    warm_up_seconds: dict[str, float] = {}
    fit_bytes: dict[str, int] = {}
    checks: list[Check] = []
    is_complete: bool = False

    def all_checks(self) -> list[Check]:
        """Return the bars of all steps, and those beside them."""
        return [*(check for step in self.steps for check in step.checks), *self.checks]


def measure_engine(
    results: EngineResults, platform: str, compile_run: Compile, write: Callable[[], None], is_shrunk: bool = False
) -> None:
    """Add the figures of a platform to results, and write and show them as they come.

    Raises:
        CompilerError: the compiler failed.
    """
    for case in SHRUNK if is_shrunk else CASES:
        if case.platform == platform:
            results.steps.append(measure_step(case, compile_run))
            print(step_text(results.steps[-1]), flush=True)
            write()
    for case in () if is_shrunk else WARM_UPS:
        if case.platform == platform:
            results.warm_up_seconds, check = measure_warm_up(case, compile_run)
            results.checks.append(check)
            write()
    if not is_shrunk and FIT.platform == platform:
        results.fit_bytes, check = measure_fit(FIT, compile_run)
        results.checks.append(check)
    results.is_complete = True
    write()
    print(rest_text(results), flush=True)


# Where the engine's own names stand, and nowhere else.

DECODE, PREFILL = "decode", "prefill"
"""Names in `Programs.by_name` of the decoding of rows that filter nothing, and of the largest program that prefills."""


def steps_of_turn(trips: int | None) -> int:
    """Return the steps that one turn of the loop makes: more than one where the compiler has unrolled it.

    >>> steps_of_turn(None), steps_of_turn(max(DISPATCH_TOKENS)), steps_of_turn(max(DISPATCH_TOKENS) // 2)
    (1, 1, 2)
    """
    return 1 if trips is None else max(1, round(max(DISPATCH_TOKENS) / trips))


def held_tokens(run: PlannedRun) -> int:
    """Return the tokens whose keys and values the engine has memory for."""
    return run.policy.cache_tokens or run.policy.slots * run.policy.max_context_tokens


def programs_of(run: PlannedRun, target: Target) -> Programs:
    """Return the programs of a run, without devices."""
    mesh = run.policy.mesh
    sizes = (1, 1, 1) if mesh is None else (mesh.data, mesh.fsdp, mesh.tensor)
    return Programs(run, AbstractMesh(sizes, AXES), target.device)


def pool_bytes(programs: Programs) -> int:
    """Return the bytes on each device of the keys of one layer, which are those of its values."""
    model, tensor = programs.run.model, programs.sharding.mesh.shape["tensor"]
    heads = math.ceil(model.num_kv_heads / tensor)
    return heads * held_tokens(programs.run) * model.head_dim * programs.compute_dtype.itemsize


def weights_bytes(programs: Programs) -> int:
    """Return the bytes on each device of the weights that a step reads: all, but no embedding that is not the head."""
    weights = WeightTransfer(programs.model).shapes(programs.params)
    read = {name: leaf for name, leaf in weights.items() if name != "embed" or programs.run.model.tie_word_embeddings}
    return device_bytes(programs.sharding.gathered(), read)


def logits_bytes(programs: Programs) -> int:
    """Return the bytes on each device of one table of logits."""
    return programs.run.policy.slots * programs.run.model.vocab_size * 4 // programs.sharding.devices


def at_most(name: str, value: float, wanted: float) -> Check:
    """Return the check that a value is at most another."""
    return Check(name=name, value=value, relation="at most", wanted=wanted)


# Steps.


def measure_step(case: EngineCase, compile_run: Compile) -> StepResult:
    """Compile the decoding of a case with few layers, and return the figures of the whole model.

    Raises:
        CompilerError: the compiler failed, or products are in no loop.
    """
    target, whole = find_target(case.target), programs_of(case.run(), find_target(case.target))
    pool, layers = pool_bytes(whole), whole.run.model.num_layers
    decoded = [compile_run(case.run(few), target, DECODE, pool) for few in case.depths]
    has_prefill = case.slots == max(MOST_BYTES)
    prefilled = [compile_run(case.run(case.depths.more), target, PREFILL, pool)] if has_prefill else []
    steps = [_step(case, each) for each in decoded]
    per_turn = [steps_of_turn(step.trips) for step in steps]

    def at_depth(of: Callable[[Step], int]) -> int:
        return round(case.depths.at((of(step) / n for step, n in zip(steps, per_turn, strict=True)), layers))

    weights, logits = weights_bytes(whole), logits_bytes(whole)
    moved, far = at_depth(lambda step: step.bytes), at_depth(lambda step: step.far_bytes)
    launches, outer = case.depths.per_layer(*(_scaled(step.counts, n) for step, n in zip(steps, per_turn, strict=True)))
    kernels = [_scaled(_attention(step), n) for step, n in zip(steps, per_turn, strict=True)]
    waits = sum(each.times for each in steps[1].launches if each.opcode in WAITS)
    prefill = prefilled[0].compiled.temporaries if prefilled else None  # the same from the third layer on
    copies, calls = list(decoded[1].copies), case.depths.per_layer(*kernels)[0]
    beside = at_depth(lambda step: step.attention_bytes) / layers
    checks = [
        at_most("bytes of a step / weights and logits", far / (weights + logits), MOST_BYTES[case.slots]),
        at_most("large copies", len(copies), 0),
        Check(name="kernels of attention in a layer", value=sum(calls.values()), relation="at least", wanted=1),
    ]
    if case.platform == "gpu":
        checks.append(at_most("launches of a layer", sum(launches.values()), MOST_LAUNCHES))
        checks.append(at_most("launches that wait for the host", waits, 0))
    if case.slots == len(row_lengths()) and calls:
        ratio = attention_ratio(whole, beside)
        checks.append(at_most("bytes of attention / keys and values held", ratio, MOST_ATTENTION_BYTES))
    if prefill is not None:
        checks.append(at_most("bytes of prefill's temporaries", prefill, MOST_PREFILL_BYTES[case.model]))
    return StepResult(
        title=case.title,
        trips=steps[1].trips,
        moved_bytes=moved,
        far_bytes=far,
        weights_bytes=weights,
        logits_bytes=logits,
        launches=launches,
        outer_launches=outer,
        waits=waits,
        attention=calls,
        attention_bytes=round(beside),
        copies=copies,
        decode_temporaries_bytes=round(case.depths.at((each.compiled.temporaries for each in decoded), layers)),
        prefill_temporaries_bytes=prefill,
        compile_seconds=[each.compiled.seconds for each in (*decoded, *prefilled)],
        checks=checks,
    )


def _step(case: EngineCase, compiled: CompiledStep) -> Step:
    if compiled.step is None:
        raise CompilerError(f"{case.title}: the program that decodes has no loop with products of matrices")
    return compiled.step


def _attention(step: Step) -> dict[str, int]:
    return Step(step.trips, [each for each in step.launches if each.is_attention]).counts


def _scaled(counts: Mapping[str, int], steps: int) -> Counts:
    return {label: count / steps for label, count in counts.items()}


# Attention.


def row_lengths(rows: int = 256, average: int = 600, longest: int = 3000) -> list[int]:
    """Return tokens of rows with a long tail: quantiles of a power law, the shortest first.

    >>> lengths = row_lengths()
    >>> len(lengths), sum(lengths) / 256, lengths[0], lengths[128], lengths[-1]
    (256, 600.0, 1, 189, 3000)
    """
    power = longest / average - 1  # the mean of u ** power is 1 / (power + 1)
    lengths = [max(1, round(longest * ((row + 0.5) / rows) ** power)) for row in range(rows - 1)] + [longest]
    surplus = sum(lengths) - rows * average
    step = 1 if surplus > 0 else -1
    for row in range(rows // 2, rows // 2 + abs(surplus)):
        lengths[row] -= step
    return lengths


def loaded_tokens(lengths: Sequence[int], block: int) -> int:
    """Return the tokens that a kernel loads for rows of these lengths, block by block.

    >>> loaded_tokens([3, 64, 65], block=64)
    256
    """
    return sum(math.ceil(length / block) * block for length in lengths)


def attention_ratio(programs: Programs, beside: float) -> float:
    """Return the bytes of attention's kernels in a layer over those of the keys and values that 256 rows hold.

    Args:
        programs: the programs.
        beside: bytes that the kernels of a layer read and write beside the pages.
    """
    lengths, token = row_lengths(), 2 * pool_bytes(programs) / held_tokens(programs.run)
    moved = loaded_tokens(lengths, PAGE_TOKENS) + len(lengths)  # each row writes a token
    return (moved * token + beside) / (sum(lengths) * token)


# All programs, and all memory.


def measure_warm_up(case: EngineCase, compile_run: Compile) -> tuple[dict[str, float], Check]:
    """Return the CPU seconds to compile each program that `warm_up` runs, and the check of their sum."""
    target = find_target(case.target)
    names = programs_of(case.run(), target).warm_up()
    seconds = {name: compile_run(case.run(), target, name, 0).compiled.cpu_seconds for name in names}
    name = f"CPU seconds to compile the {len(seconds)} programs of warm_up, {case.title}"
    return seconds, at_most(name, sum(seconds.values()), MOST_COMPILE_SECONDS)


def measure_fit(case: EngineCase, compile_run: Compile) -> tuple[dict[str, int], Check]:
    """Return the memory of requests beside the training of adapters, by purpose, and its check.

    The checkpoint policy is the first that fits, as with `remat: auto`.

    Raises:
        CompilerError: the compiler failed, or the last checkpoint policy needs too much memory for itself.
    """
    run, target = case.run(), find_target(case.target)
    limit, layers = memory_limit(target), run.model.num_layers
    temporaries = [
        case.depths.at(
            (compile_run(case.run(few), target, DECODE, 0).compiled.temporaries for few in case.depths), layers
        ),
        compile_run(case.run(case.depths.more), target, PREFILL, 0).compiled.temporaries,
    ]
    held = programs_of(run, target).held() | {"sampling temporaries": round(max(temporaries))}
    remats = auto_remats(target.chip.platform)
    for remat in remats:
        estimated, is_last = estimate_update(programs_of(run.with_remat(remat), target)), remat == remats[-1]
        if not is_last and peak(held | {"update": estimated}) > MARGIN * limit:
            continue
        try:
            memory = held | {"update": compile_run(run.with_remat(remat), target, "gradient", 0).compiled.temporaries}
        except CompilerError as error:
            if is_last or not error.is_out_of_memory:
                raise
            continue
        if peak(memory) <= limit:
            break
    name = f"memory / limit, {case.title} that hold {held_tokens(run):,} tokens, training of adapters"
    return memory, at_most(name, peak(memory) / limit, 1.0)


# Text.


def step_text(step: StepResult) -> str:
    """A step as text: bytes, launches, copies, temporaries, and each bar with its verdict."""
    loop = "an unknown number of turns" if step.trips is None else f"{step.trips} turns"
    launches = ", ".join(f"{label} {count:g}" for label, count in step.launches.items())
    kernels = ", ".join(f"{label} {count:g}" for label, count in step.attention.items())
    copies = [f"{each.opcode} {each.array} at {each.where} ({each.label})" for each in step.copies]
    prefill = step.prefill_temporaries_bytes
    rows = [
        f"== decode, {step.title}: a loop of {loop} (compiled in {sum(step.compile_seconds):.0f} s)",
        f"  {step.moved_bytes / 1e6:,.0f} MB moved, {step.far_bytes / 1e6:,.0f} without cached arrays; weights "
        f"{step.weights_bytes / 1e6:,.0f}, logits {step.logits_bytes / 1e6:,.0f}",
        f"  {sum(step.launches.values()):g} launches a layer: {launches}",
        f"  {sum(step.outer_launches.values()):g} launches beside the layers; attention: {kernels or 'no kernel'}, "
        f"{step.attention_bytes / 1e6:.1f} MB a layer beside the pages",
        f"  temporaries: decode {step.decode_temporaries_bytes / GIB:.3f} GiB"
        + ("" if prefill is None else f", prefill {prefill / GIB:.3f} GiB"),
        *(f"  copies: {each}" for each in copies),
    ]
    return "\n".join([*rows, *map(check_text, step.checks)])


def rest_text(results: EngineResults) -> str:
    """The time to compile, the memory, and each bar beside those of the steps with its verdict."""
    rows = ["== the engine as a whole"]
    if results.warm_up_seconds:
        seconds = ", ".join(f"{name} {value:.0f}" for name, value in results.warm_up_seconds.items())
        rows.append(f"  CPU seconds: {seconds}")
    if results.fit_bytes:
        rows.append(f"  GiB: {', '.join(f'{name} {size / GIB:.2f}' for name, size in results.fit_bytes.items())}")
    return "\n".join([*rows, *map(check_text, results.checks)])

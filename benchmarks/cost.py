"""Least time of a compiled program, launch by launch: what it moves, computes and starts, by place and kind of work.

    python benchmarks/cost.py --layers 4                                  # an update on an H100: a minute on two cores
    python benchmarks/cost.py --program head                              # scores and their gradient alone
    python benchmarks/cost.py --program head --target v5e-8 --rows 4      # 8,192 tokens on a TPU
    python benchmarks/cost.py --program gradient --rows 1 --prompt 1536 --answers 8 --width 5632 --layers 4
    python benchmarks/cost.py --program prefill_8192 --layers 4 --width 512
    python benchmarks/cost.py --program gradient --model qwen3-30b-a3b --layers 2 --target h200x1
    python benchmarks/cost.py --program decode --slots 8 --model qwen3-30b-a3b --layers 2 --target v5p-8

A launch takes max(bytes / bandwidth, operations / arithmetic), by rates that programs were seen to reach, and 1.5 us on
GPUs. On an H100 that gives 202 ms for the gradient of Qwen3-0.6B that took 225: what moves memory takes 1.29 times as
long, and the calibrated time has that factor. With fewer layers than the model has, a last line has those of the scope
`layers` as often as there are layers; the optimizer step is counted by its parameters. Products of experts count with
the rows of all blocks that they can need, and with the weights of as many experts as there are rows; the last line of
a mixture divides the operations of a gradient, or the bytes of decoding, by those that are needed. Nothing is run:
this process has the compilers of `scripts/make_compilers.sh`, in whose environment it begins anew.
"""

import argparse
import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jaxft
from aot import Case
from hlo import Launch, Program, read
from jaxft.components.programs import PlannedRun
from jaxft.core.fused_head import takes_fused_head
from jaxft.core.packing import Branches
from jaxft.core.sharding import make_mesh
from jaxft.core.update import loss_and_gradients
from jaxft.models.ceilings import attention_flops, matmul_weights, model_flops, tokens_seen
from jaxft.models.config import DecoderConfig, model_preset
from jaxft.models.decoder import decoder, parameter_shapes
from jaxft.models.decoder_sharding import sharding_for
from jaxft.models.layer_stack import REMATS
from jaxft.planning import compiler
from jaxft.planning.compiler import CompilerError
from jaxft.planning.flops import gradient_flops
from jaxft.planning.targets import find_target
from roofline import parameter_count

GIB = 2**30


class Reached(NamedTuple):
    """Rates that programs reach: bytes and operations per second, those of attention, and seconds of a launch."""

    bandwidth: float
    arithmetic: float
    attention: float
    launch: float


REACHED = {
    "a100": Reached(1.7e12, 227e12, 151e12, 1.5e-6),
    "h100": Reached(2.8e12, 720e12, 480e12, 1.5e-6),
    "h200": Reached(4.1e12, 720e12, 480e12, 1.5e-6),
    "v5e": Reached(0.75e12, 180e12, 80e12, 0.0),
    "v6e": Reached(1.4e12, 780e12, 300e12, 0.0),
    "v5p": Reached(2.5e12, 420e12, 185e12, 0.0),
}
"""Rates of an H100 were measured; those of other chips follow from the makers' figures, in proportion."""

MOVES_CALIBRATED = 1.29
"""Time of launches that only move memory, on an H100, over their time by the model."""

EXPERTS_BLOCKS = {"grouped_dot": 128, "grouped_outer": 64, "gmm": 128, "tgmm": 128}
"""Most rows of a block in kernels of experts, by their names."""

ATTENTION = re.compile(r"^(?!.*preprocess).*(fmha|mha|attention|splash|paged)")  # what comes before it has no products
BACKWARD = {"dkv": 2.0, "dq": 1.5, "backward": 2.5, "bwd": 2.5}
"""Products of attention's backward kernels over the two of the forward kernel, by a word of their names."""


class Cost(NamedTuple):
    """A launch with its place (`layers`, `head`, `step`, or `rest`), its kind, and figures of all its turns."""

    launch: Launch
    place: str
    kind: str
    seconds: float
    bytes: int
    flops: float
    times: int

    def scaled(self, factor: float) -> "Cost":
        """Return the cost of so many times the launches."""
        more = (factor * each for each in (self.seconds, self.bytes, self.flops, self.times))
        return Cost(self.launch, self.place, self.kind, *more)  # type: ignore[arg-type]


def costs(
    program: Program, reached: Reached, of_attention: float, pool_bytes: int = 0, *, name: str = "", layers: int = 0
) -> list[Cost]:
    """Return the cost of each launch of a program.

    Args:
        program: the program.
        reached: rates of the chip.
        of_attention: operations of the forward kernel of attention of one layer.
        pool_bytes: bytes of the keys of a layer in pages, which a kernel does not read as a whole; 0 without pages.
        name: name of the program; all of `step` stands at that place.
        layers: number of layers; what writes arrays of them all, such as sums of gradients, stands at their place, too.
    """
    found = []
    for launch in program.launches:
        # The words of a path: `transpose(jvp(layers))/while/body`.
        default = "layers" if any(array.shape[:1] == (layers,) for array in launch.arrays) else "rest"
        place = next(iter(re.findall(r"\b(layers|head)\b", launch.op_name)), default) if name != "step" else name
        said = " ".join((launch.label, launch.op_name, *(each.target for each in launch.kernels))).lower()
        moved, flops, arithmetic = launch.bytes, float(launch.flops), reached.arithmetic
        kind = "product" if flops else "move"
        if launch.opcode == "custom-call" and launch.kernels and ATTENTION.search(said):
            accesses = (*launch.reads, *launch.writes)
            moved -= sum(size for size in accesses if 0 < pool_bytes <= 2 * size)
            backward = next((share for word, share in BACKWARD.items() if word in said), 1.0)
            kind, flops, arithmetic = "attention", of_attention * backward, reached.attention
        elif launch.label in EXPERTS_BLOCKS and launch.instruction is not None:
            (flops, moved), kind = expert_work(launch), "product"
        seconds = max(moved / reached.bandwidth, flops / arithmetic) + reached.launch
        found.append(Cost(launch, place, kind, seconds, moved, flops, 1).scaled(launch.times))
    return found


def expert_work(launch: Launch) -> tuple[float, int]:
    """Return operations and bytes of a kernel of experts: all blocks that rows may need, weights of experts with rows.

    An expert with a last block that is not full has half a block too many on average; here each has a whole one.
    """
    assert launch.instruction is not None
    arrays = [*launch.instruction.operand_arrays, *launch.arrays]
    weights = next(array for array in arrays if len(array.shape) == 3)
    experts, *sides = weights.shape
    of_expert = weights.bytes // experts
    rows = max(array.shape[0] for array in arrays if len(array.shape) == 2)
    block = min(EXPERTS_BLOCKS[launch.label], max(16, 1 << (rows // experts).bit_length()))
    is_read = len(launch.arrays[0].shape) == 2
    unread = max(0, experts - rows) * of_expert if is_read else 0
    return 2.0 * math.prod(sides) * (rows + experts * block), launch.bytes - unread


def needed_text(found: Sequence[Cost], whole: DecoderConfig, parsed: argparse.Namespace) -> str:
    """Return the operations of the gradient of a mixture over those needed, or the bytes of decoding, as text."""
    spent = [sum(column) for column in zip(*(cost[4:6] for cost in found), strict=True)]
    if parsed.program == "gradient":
        needed, shape = model_flops(whole, parsed.rows, parsed.width), (whole, parsed.rows, parsed.width)
        platform, scored = find_target(parsed.target).chip.platform, parsed.rows * (parsed.width - 1)
        is_fused = takes_fused_head(platform, scored, whole.vocab_size, jnp.bfloat16, whole.logit_scale)
        again = gradient_flops(*shape, parsed.remat, is_fused=is_fused, platform=platform)
        again -= gradient_flops(*shape, "none", is_fused=True, platform=platform)
        once = (spent[1] - again) / needed
        return (
            f"operations {spent[1] / 1e12:.1f} T, needed {needed / 1e12:.1f} T: {spent[1] / needed:.3f}; {once:.3f} "
            f"without the {again / 1e12:.1f} T of remat and of logits that are computed twice"
        )
    hit = min(whole.num_experts, parsed.slots * whole.num_experts_per_tok)
    steps = sum(cost.times for cost in found if cost.launch.label in EXPERTS_BLOCKS) / 3 / whole.num_layers
    every = replace(whole, num_experts_per_tok=hit)
    read_bytes = 2 * matmul_weights(every) * steps
    return (
        f"bytes of a token {spent[0] / steps / 1e9:.2f} GB, weights of {hit} experts a layer and all others "
        f"{read_bytes / steps / 1e9:.2f} GB: {spent[0] / read_bytes:.3f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the costs of the programs of a command line, by default that of the process, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = "update (gradient and step), gradient, step, head, prefill, decode, or one of a warm-up"
    parser.add_argument("--program", default="update", metavar="NAME", help=f"{programs} (default %(default)s)")
    parser.add_argument("--model", default="qwen3-0.6b", metavar="PRESET", help="default %(default)s")
    parser.add_argument("--target", default="h100x1", help="default %(default)s")
    parser.add_argument("--layers", type=int, metavar="N", help="compile so many (default: all)")
    parser.add_argument("--rows", type=int, default=8, help="rows of a microbatch on a device (default %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="tokens of a row, or of a prompt (default %(default)s)")
    parser.add_argument("--slots", type=int, default=128, help="slots of the engine (default %(default)s)")
    parser.add_argument("--remat", choices=REMATS, help="checkpoint policy (default: none on GPUs, dots on TPUs)")
    parser.add_argument("--packed", action="store_true", help="packed rows; two sequences in each where a kernel skips")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that the answers of a row share")
    parser.add_argument("--answers", type=int, help="answers in each row of the gradient, behind their prompt")
    parser.add_argument("--sampling", choices=("int8", "fp8"), help="kernels to sample with (default: bfloat16)")
    parser.add_argument("--quantize-head", action="store_true", help="with --sampling: the head as well")
    parser.add_argument("--kv-cache", choices=("fp8",), help="with --sampling: keys and values (default: bfloat16)")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="lines of launches (default %(default)s)")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled program there, too")
    parser.add_argument("--compiler", type=Path, metavar="PYTHON", help="interpreter with the compilers")
    parsed = parser.parse_args(arguments)
    interpreter = (parsed.compiler or compiler.default_interpreter()).absolute()
    if Path(sys.prefix) != interpreter.parent.parent:
        try:
            compiler.versions(interpreter)
        except CompilerError as error:
            print(f"cost.py: {error}", file=sys.stderr)
            return 2
        sys.stdout.flush()
        given = sys.argv[1:] if arguments is None else arguments
        os.execve(interpreter, [str(interpreter), __file__, *given], compiler.compiler_environment(interpreter))
    try:
        target, whole = find_target(parsed.target), model_preset(parsed.model)
        parsed.remat = parsed.remat or ("none" if target.chip.platform == "gpu" else "dots")
        names = ("gradient", "step") if parsed.program == "update" else (parsed.program,)
        report([cost for name in names for cost in compiled_costs(parsed, name)], whole, parsed)
    except ValueError as error:
        print(f"cost.py: {error}", file=sys.stderr)
        return 2
    return 0


def compiled_costs(parsed: argparse.Namespace, name: str) -> list[Cost]:
    """Compile a program and return its costs; say how long that took and what it holds.

    Raises:
        ValueError: there is no program of this name.
    """
    run, started = planned(parsed), time.perf_counter()
    if name == "head":
        lowered = lowered_head(parsed, run.model)
    elif parsed.answers:
        lowered = lowered_branches(parsed, run.model)
    else:
        try:
            lowered = compiler.lower({"run": run.to_json(), "target": parsed.target, "program": name})
        except KeyError:
            raise ValueError(f"no program is named {name!r}; see --help, and the names of `Programs.warm_up`") from None
    compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if parsed.hlo:
        parsed.hlo.write_text(text)
    shape = f"{run.model.num_layers} layers, {parsed.rows} x {parsed.width:,}{', packed' if parsed.packed else ''}"
    print(
        f"== {name} of {parsed.model}, {shape}, {parsed.target}, remat {parsed.remat}: temporaries "
        f"{memory.temp_size_in_bytes / GIB:.2f} GiB, compiled in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    is_sampling = name not in ("gradient", "head", "step")
    pool = 2 * run.model.num_kv_heads * run.model.head_dim * (run.policy.cache_tokens or 0) if is_sampling else 0
    target, model = find_target(parsed.target), run.model
    seen, rows = tokens_seen(model.kinds, 1, parsed.width) / model.num_layers, parsed.rows
    if is_sampling:  # of a program's places, whose prompts have the width
        rows = int(re.findall(r"\d+", name)[0]) / parsed.width if re.search(r"\d", name) else 1
    elif parsed.packed and "cudnn$fmha" in text:  # which skips what another sequence holds
        seen /= 2
    elif parsed.answers:  # the launches of three calls, each with a third of the operations of all
        answer = (parsed.width - parsed.prompt) // parsed.answers
        seen = (parsed.prompt**2 / 2 + parsed.answers * answer * (parsed.prompt + answer / 2)) / (
            3 if target.chip.platform == "gpu" else 2
        )
    rates, layers = REACHED[target.kind], model.num_layers
    return costs(read(text), rates, attention_flops(model, 1) * seen * rows, pool, name=name, layers=layers)


def planned(parsed: argparse.Namespace) -> PlannedRun:
    """Return the run whose programs are compiled."""
    case = Case(parsed.target, parsed.model, parsed.rows, parsed.width, parsed.lora, parsed.layers)
    run = case.run().with_remat(parsed.remat)
    changes = {"slots": parsed.slots, "cache_tokens": parsed.slots * parsed.width}
    changes |= {"sampling_dtype": parsed.sampling, "quantize_head": parsed.quantize_head}
    changes |= {"kv_cache_dtype": parsed.kv_cache}
    return run._replace(
        policy=run.policy.model_copy(update=changes),
        adapter=run.adapter.model_copy(update={"packing": parsed.packed}),
    )


def lowered_head(parsed: argparse.Namespace, config: DecoderConfig) -> Any:
    """Lower the scores of given hidden states on one device, with the gradients of these and of the head's weights."""
    mesh = make_mesh(1, 1, 1, devices=compiler.topology_devices(find_target(parsed.target))[:1])
    shaped = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    whole = decoder(config, parsed.remat, compute_dtype=jnp.bfloat16, sharding=sharding_for(config, mesh))
    shapes = parameter_shapes(config)
    weights = {name: shaped(shapes[name].shape, jnp.bfloat16) for name in ("embed", "lm_head") if name in shapes}
    model = whole._replace(apply=lambda params, *_, **__: (params["hidden"], None))
    shape = parsed.rows, parsed.width
    params = weights | {"hidden": shaped((*shape, config.hidden_size), jnp.bfloat16)}

    def loss(params: Any, tokens: Any, gradients: Any) -> Any:
        scored = jaxft.token_logprobs(model, params, tokens)
        return (scored.logprobs * gradients).sum(), scored.entropy

    return jax.jit(jax.grad(loss, has_aux=True)).lower(params, shaped(shape, jnp.int32), shaped(shape, jnp.float32))


def lowered_branches(parsed: argparse.Namespace, config: DecoderConfig) -> Any:
    """Lower the gradient of GRPO on one device, in rows of a prompt and its answers."""
    mesh = make_mesh(1, 1, 1, devices=compiler.topology_devices(find_target(parsed.target))[:1])
    shaped = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    model = decoder(config, parsed.remat, compute_dtype=jnp.bfloat16, sharding=sharding_for(config, mesh))
    params = jax.tree.map(lambda x: shaped(x.shape, x.dtype), parameter_shapes(config))
    dtypes: list[Any] = [jnp.int32, jnp.bool_, jnp.float32]
    tokens, mask, floats = (cast(Any, shaped((parsed.rows, parsed.width), dtype)) for dtype in dtypes)
    layout = Branches(parsed.prompt, parsed.answers)
    batch = jaxft.Batch(
        tokens, mask, floats, floats, floats, floats, positions=tokens, segment_ids=tokens, branches=layout
    )
    return jax.jit(partial(loss_and_gradients, model, jaxft.grpo_loss)).lower(params, batch)


def report(found: Sequence[Cost], whole: DecoderConfig, parsed: argparse.Namespace) -> None:
    """Print the costs by place and kind, their sum, the sum of all layers, and the dearest launches."""
    groups = defaultdict(list)
    for cost in found:
        groups[cost.place, cost.kind].append(cost)
    print(f"{'place':<8} {'kind':<10} {'ms':>8} {'GB':>8} {'TFLOP':>7} {'launches':>8}")
    for (place, kind), members in sorted(groups.items()):
        print(f"{place:<8} {kind:<10} {figures(members)}")
    print(f"{'in all':<19} {figures(found)}; {times_text(found)}")
    if parsed.layers not in (None, whole.num_layers):
        part = replace(whole, num_layers=parsed.layers)
        factors = {"layers": whole.num_layers / parsed.layers, "step": parameter_count(whole) / parameter_count(part)}
        found = [cost.scaled(factors.get(cost.place, 1.0)) for cost in found]
        print(f"{f'{whole.num_layers} layers':<19} {figures(found)}; {times_text(found)}")
    if whole.num_experts and parsed.program in ("gradient", "decode"):
        print(needed_text(found, whole, parsed))
    kinds = defaultdict(list)
    for cost in found:
        origin = re.sub(r".*?(/while/body|jit\(\w+\))/?", "", cost.launch.op_name)[-80:]
        shapes = ",".join(map(str, cost.launch.arrays))[:60]
        kinds[f"{cost.place} {cost.kind} {cost.launch.label[:30]} {shapes} {origin}"].append(cost)
    for text, members in sorted(kinds.items(), key=lambda each: -sum(cost.seconds for cost in each[1]))[: parsed.top]:
        print(f"{figures(members)}  {text}")


def figures(found: Sequence[Cost]) -> str:
    """Return milliseconds, gigabytes, teraflops and launches of costs as text."""
    seconds, size, flops, times = (sum(column) for column in zip(*(cost[3:] for cost in found), strict=True))
    return f"{seconds * 1e3:>8.2f} {size / 1e9:>8.2f} {flops / 1e12:>7.2f} {times:>8,.0f}"


def times_text(found: Sequence[Cost]) -> str:
    """Return the times by kind as text, and the calibrated time.

    >>> cost = Cost(Launch("copy", "copy", (), 1), "rest", "move", 0.1, 1, 0.0, 1)
    >>> times_text([cost, cost._replace(kind="product")])
    'ms: move 100.0, product 100.0; calibrated 229.0'
    """
    spent: defaultdict[str, float] = defaultdict(float)
    for cost in found:
        spent[cost.kind] += cost.seconds
    calibrated = sum(spent.values()) + (MOVES_CALIBRATED - 1) * spent["move"]
    by_kind = ", ".join(f"{kind} {seconds * 1e3:.1f}" for kind, seconds in sorted(spent.items()) if seconds)
    return f"ms: {by_kind}; calibrated {calibrated * 1e3:.1f}"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the devices of this machine are not asked
    sys.exit(main())

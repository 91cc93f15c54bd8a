"""Figures read from the text of compiled programs: exact, against numbers that a reader can work out.

Texts are of four kinds: written here in the forms that compilers print, compiled here for the CPU, compiled here for
eight CPU devices in a process of its own, and compiled for a TPU v5e and an H200 (`data/`, from which kernels' code,
source locations and tuning were cut).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from decode_step import accesses, rearranged
from hlo import read
from hlo_text import Array

DATA = Path(__file__).parent / "data"


def module(entry, before="", header="HloModule m"):
    return f"{header}\n\n{before}\n\nENTRY %main () -> f32[] {{\n{entry}\n}}\n"


def one(line, *parameters, **options):
    """Figures of a program of one instruction, with its operands as parameters."""
    given = [f"  %p{i} = {of_type} parameter({i})" for i, of_type in enumerate(parameters)]
    return read(module("\n".join([*given, "  ROOT %r = " + line]), **options))


@pytest.mark.parametrize(
    ("of_type", "sizes"),
    [
        ("f32[2,3]{1,0}", {"f32[2,3]": 24}),
        ("f32[2,3]", {"f32[2,3]": 24}),
        ("s32[]", {"s32[]": 4}),
        ("pred[7]{0}", {"pred[7]": 7}),
        ("c64[2]{0}", {"c64[2]": 16}),
        ("f8e4m3fn[16]{0}", {"f8e4m3fn[16]": 16}),
        ("f8e8m0fnu[4]{0}", {"f8e8m0fnu[4]": 4}),
        ("s4[3,5]{1,0:E(4)}", {"s4[3,5]": 8}),  # 60 bits
        ("f32[<=8,16]{1,0}", {"f32[8,16]": 512}),
        ("s32[]{:T(128)}", {"s32[]": 512}),
        ("bf16[3,100]{1,0:T(8,128)(2,1)}", {"bf16[3,100]": 8 * 128 * 2}),
        ("bf16[100,3]{0,1:T(8,128)(2,1)}", {"bf16[100,3]": 8 * 128 * 2}),  # the first dimension is the minor one
        ("bf16[1024]{0:T(1024)(128)(2,1)}", {"bf16[1024]": 2048}),
        (
            "(f32[2]{0}, (s8[3]{0}, token[]), /*index=2*/bf16[4]{0})",
            {"f32[2]": 8, "s8[3]": 3, "token[]": 0, "bf16[4]": 8},
        ),
        ("()", {}),
    ],
)
def test_types(of_type, sizes):
    arguments = read(module(f"  ROOT %p = {of_type} parameter(0)")).arguments
    assert {str(array): array.bytes for array in arguments} == sizes


def test_parts_of_a_layout():
    (array,) = read(module("  ROOT %p = bf16[8,100]{0,1:T(8,128)(2,1)S(1)} parameter(0)")).arguments
    assert array == Array("bf16", (8, 100), (0, 1), "(8,128)(2,1)", 1)
    assert array.device_bytes == 0  # inside the chip
    assert array._replace(tiles="").device_bytes == 1600  # a GPU's memory for collectives


CUBLAS = (
    'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}'
)


ONEDNN = 'custom_call_target="__onednn$matmul", backend_config={"onednn_matmul_config":{"transpose_a":true}}'
BATCHES = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}"


@pytest.mark.parametrize(
    ("line", "lhs", "rhs", "flops"),
    [
        ("f32[4,8,32]{2,1,0} dot(%p0, %p1), " + BATCHES, "f32[4,8,16]", "f32[4,16,32]", 2 * 4 * 8 * 16 * 32),
        ("f32[] dot(p0, p1), lhs_contracting_dims={0}, rhs_contracting_dims={0}", "f32[16]", "f32[16]", 2 * 16),
        ("f32[8,32] dot(f32[8,16]{1,0} %p0, f32[16,32]{1,0:T(8,128)} %p1), lhs_contracting_dims={1}",
         "f32[8,16]", "f32[16,32]", 2 * 8 * 16 * 32),
        ("(bf16[8,32]{1,0}, s8[64]{0}) custom-call(%p0, %p1), " + CUBLAS, "bf16[8,16]", "bf16[16,32]", 2 * 8 * 16 * 32),
        ("bf16[8,32]{1,0} custom-call(%p0, %p1), " + ONEDNN, "bf16[16,8]", "bf16[16,32]", 2 * 8 * 16 * 32),
        ("bf16[8,32]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf", "bf16[8,16]", "bf16[16,32]", 2 * 8 * 16 * 32),
        ("bf16[8,32]{1,0} convolution(%p0, %p1), dim_labels=fb_oi->bf", "bf16[16,8]", "bf16[32,16]", 2 * 8 * 16 * 32),
        # A product with two batch dimensions, 4 x 2: each output meets one element that is not between dilated ones.
        ("f32[4,2,8,32] convolution(%p0, %p1), window={size=4x2 stride=3x1 lhs_dilate=4x2}, dim_labels=01bf_01io->01bf",
         "bf16[4,2,8,16]", "bf16[4,2,16,32]", 4 * 2 * 2 * 8 * 16 * 32),
        # A contraction over two dimensions, 5 and 16.
        ("bf16[8,1,32] convolution(%p0, %p1), window={size=5}, dim_labels=b0f_0io->b0f",
         "bf16[8,5,16]", "bf16[5,16,32]", 5 * 2 * 8 * 16 * 32),
        # Two products in one: of the two positions of each output one is padding.
        ("bf16[8,2,32] convolution(%p0, %p1), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=b0f_0io->b0f",
         "bf16[8,1,16]", "bf16[2,16,32]", 2 * 2 * 8 * 16 * 32),
        # 6 outputs of a window of 3 on 6 elements, padded: 18 positions less the two on padding; 4 groups of features.
        ("f32[2,6,8] convolution(%p0, %p1), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, feature_group_count=4",
         "f32[2,6,8]", "f32[3,2,8]", 16 * 2 * 2 * 2 * 8),
        # A gradient of grouped kernels: batches of 4 in two groups, each output feature sees two of them.
        ("f32[2,1,8] convolution(%p0, %p1), window={size=6}, dim_labels=b0f_0io->b0f, batch_group_count=2",
         "f32[4,6,3]", "f32[6,3,8]", 6 * 2 * 2 * 3 * 8),
    ],
)  # fmt: skip
def test_flops_of_a_product(line, lhs, rhs, flops):
    program = one(line, lhs, rhs)
    assert (program.flops, program.kernels) == (flops, [])


def loops(program):
    return {launch.loops for launch in program.launches if launch.loops}


DOT = "f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"  # 128 flops
LOOP = """
%body (c: (s32[], f32[4,4], s32[])) -> (s32[], f32[4,4], s32[]) {{
  %c = (s32[], f32[4,4]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %copied = s32[] copy(%i)
  %two = s32[] constant(2)
  %next = s32[] add(%copied, %two)
  %x = f32[4,4]{{1,0}} get-tuple-element(%c), index=1
  %end = s32[] get-tuple-element(%c), index=2
  %y = {dot}
  ROOT %t = (s32[], f32[4,4]{{1,0}}, s32[]) tuple(%next, %y, {end})
}}

%condition (c: (s32[], f32[4,4], s32[])) -> pred[] {{
  %c.1 = (s32[], f32[4,4]{{1,0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %end.1 = s32[] get-tuple-element(%c.1), index=2
  ROOT %lt = pred[] compare(%i.1, %end.1), direction=LT
}}
"""
TURN = """
  %x = f32[4,4]{1,0} parameter(0)
  %start = s32[] constant(-1)
  %end = s32[] constant(6)
  %t = (s32[], f32[4,4]{1,0}, s32[]) tuple(%start, %x, %end)
  ROOT %while.1 = (s32[], f32[4,4]{1,0}, s32[]) while(%t), condition=%condition, body=%body"""


@pytest.mark.parametrize(
    ("known", "end", "trips"),
    [
        (', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}', "%end", 7),
        ("", "%end", 4),  # from -1 to 6 by 2, with an end that the loop carries
        (', metadata={op_name="jit(f)/transpose(jvp(at_most_19))/while" stack_frame_id=24}', "%next", 19),
        ("", "%next", None),  # an end that changes
    ],
)
def test_turns_of_a_loop(known, end, trips):
    program = read(module(TURN + known, LOOP.format(dot=DOT, end=end)))
    turns = trips or 1
    assert loops(program) == {(("while.1", trips),)}
    assert program.flops == 128 * turns
    # Once: three arrays of 64 bytes, an addition and a copy of integers; the condition runs once more than the body.
    assert program.bytes == turns * (3 * 64 + 3 * 4 + 2 * 4) + (turns + 1) * (2 * 4 + 1)


def test_loops_in_loops_multiply():
    outer = LOOP.format(dot="f32[4,4]{1,0} get-tuple-element(%while.2), index=1", end="%end")
    outer = outer.replace("%body", "%outer").replace("%condition", "%ends").replace(
        "  %y =",
        "  %zero = s32[] constant(0)\n"
        "  %t.2 = (s32[], f32[4,4]{1,0}, s32[]) tuple(%zero, %x, %end)\n"
        "  %while.2 = (s32[], f32[4,4]{1,0}, s32[]) while(%t.2), condition=%condition, body=%body\n"
        "  %y =",
    )  # fmt: skip
    entry = TURN.replace("%condition", "%ends").replace("%body", "%outer")
    program = read(module(entry, LOOP.format(dot=DOT, end="%end") + outer))
    assert (("while.1", 4), ("while.2", 3)) in loops(program)  # the end of the inner loop is that of the outer
    assert program.flops == 12 * 128


BRANCHES = """
%cheap (a: (f32[4,4])) -> f32[4,4] {
  %a = (f32[4,4]{1,0}) parameter(0)
  ROOT %x = f32[4,4]{1,0} get-tuple-element(%a), index=0
}

%costly (b: (f32[4,4])) -> f32[4,4] {
  %b = (f32[4,4]{1,0}) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%b), index=0
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %z = f32[4,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    "branches",
    ["true_computation=%cheap, false_computation=%costly", "branch_computations={%costly, %cheap}"],
)
def test_of_a_conditional_the_most_expensive_branch_counts(branches):
    given = "f32[4,4]{1,0} conditional(%p0, %p1, %p1), " + branches
    assert one(given, "s32[]", "(f32[4,4]{1,0})", before=BRANCHES).flops == 2 * 128


def test_calls_and_asynchronous_calls_run():
    assert one("f32[4,4]{1,0} call(%p0), to_apply=%costly", "(f32[4,4]{1,0})", before=BRANCHES).flops == 256
    entry = """
  %p0 = (f32[4,4]{1,0}) parameter(0)
  %start = ((f32[4,4]{1,0}), f32[4,4]{1,0}, s32[]) async-start(%p0), calls=%costly
  ROOT %done = f32[4,4]{1,0} async-done(%start)"""
    program = read(module(entry, BRANCHES))
    assert (program.flops, program.bytes) == (256, 2 * 3 * 64)


FUSIONS = """
%slice_and_update (a: f32[10,64], b: f32[10,64], i: s32[]) -> f32[10,64] {
  %a = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,64]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,64}
  %b = f32[10,64]{1,0} parameter(1)
  %sum = f32[1,64]{1,0} add(%row, %row)
  ROOT %new = f32[10,64]{1,0} dynamic-update-slice(%b, %sum, %i, %zero)
}

%made_and_updated (u: f32[1,64], i: s32[]) -> f32[10,64] {
  %u = f32[1,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = f32[] constant(0)
  %all = f32[10,64]{1,0} broadcast(%zero), dimensions={}
  ROOT %new = f32[10,64]{1,0} dynamic-update-slice(%all, %u, %i, %i)
}

%gathered_and_passed (table: f32[10,64], rows: s32[3], other: f32[5]) -> (f32[3,64], f32[5]) {
  %table = f32[10,64]{1,0} parameter(0)
  %rows = s32[3]{0} parameter(1)
  %other = f32[5]{0} parameter(2)
  %seen = f32[10,64]{1,0} bitcast(%table)
  %found = f32[3,64]{1,0} gather(%seen, %rows), offset_dims={1}, slice_sizes={1,64}
  ROOT %both = (f32[3,64]{1,0}, f32[5]{0}) tuple(%found, %other)
}

%sliced_and_summed (a: f32[10,64]) -> f32[64] {
  %a = f32[10,64]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %row = f32[1,64]{1,0} slice(%a), slice={[2:3], [0:64]}
  ROOT %sum = f32[64]{0} reduce(%a, %zero), dimensions={0}, to_apply=%add
}

%outer (a: f32[10,64], i: s32[]) -> f32[1,64] {
  %a = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %inner = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%row
}

%twice_updated (b: f32[10,64], u: f32[1,64], i: s32[]) -> f32[10,64] {
  %b = f32[10,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %first = f32[10,64]{1,0} dynamic-update-slice(%b, %u, %i, %i)
  ROOT %second = f32[10,64]{1,0} dynamic-update-slice(%first, %u, %i, %i)
}

%viewed (a: f32[10,64]) -> f32[5,128] {
  %a = f32[10,64]{1,0} parameter(0)
  %view = f32[640]{0} fusion(%a), kind=kLoop, calls=%view
  %other = f32[5,128]{1,0} bitcast(%view)
  ROOT %n = f32[5,128]{1,0} negate(%other)
}

%view (a: f32[10,64]) -> f32[640] {
  %a = f32[10,64]{1,0} parameter(0)
  ROOT %v = f32[640]{0} bitcast(%a)
}

%sliced_and_multiplied (w: bf16[10,64], x: f32[2,64]) -> f32[2,4] {
  %w = bf16[10,64]{1,0} parameter(0)
  %x = f32[2,64]{1,0} parameter(1)
  %wide = f32[10,64]{1,0} convert(%w)
  %turned = f32[64,10]{0,1} transpose(%wide), dimensions={1,0}
  %part = f32[64,4]{0,1} slice(%turned), slice={[0:64], [4:8]}
  ROOT %d = f32[2,4]{1,0} dot(%x, %part), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%row (a: f32[10,64], i: s32[]) -> f32[1,64] {
  %a = f32[10,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %r = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}
}
"""
ROW, TABLE = 256, 2560


@pytest.mark.parametrize(
    ("line", "parameters", "traffic"),
    [
        ("f32[10,64]{1,0} add(%p0, %p0)", ["f32[10,64]{1,0}"], 3 * TABLE),
        ("f32[10,64]{1,0} bitcast(%p0)", ["f32[10,64]{1,0}"], 0),
        ("f32[1,64]{1,0} dynamic-slice(%p0, %p1, %p1)", ["f32[10,64]{1,0}", "s32[]"], 2 * ROW + 8),
        ("f32[3,64]{1,0} gather(%p0, %p1), offset_dims={1}", ["f32[10,64]{1,0}", "s32[3]{0}"], 6 * ROW + 12),
        ("f32[10,64]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)", ["f32[10,64]", "f32[1,64]", "s32[]"], 2 * ROW + 8),
        ("f32[10,64]{1,0} scatter(%p0, %p1, %p2), to_apply=%add", ["f32[10,64]", "s32[3]", "f32[3,64]"], 6 * ROW + 12),
        ("f32[10,64]{1,0} fusion(%p0, %p1, %p2), kind=kLoop, calls=%slice_and_update",
         ["f32[10,64]", "f32[10,64]", "s32[]"], 2 * ROW + 4),
        ("f32[10,64]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%made_and_updated", ["f32[1,64]", "s32[]"], TABLE + 260),
        ("(f32[3,64], f32[5]) fusion(%p0, %p1, %p2), kind=kLoop, calls=%gathered_and_passed",
         ["f32[10,64]", "s32[3]", "f32[5]"], 6 * ROW + 12 + 2 * 20),
        ("(f32[3,64], f32[5]) fusion(%p0, %p1, %p2), output_to_operand_aliasing={{1}: (2, {})}, "
         "calls=%gathered_and_passed", ["f32[10,64]", "s32[3]", "f32[5]"], 6 * ROW + 12),
        ("f32[64]{0} fusion(%p0), kind=kLoop, calls=%sliced_and_summed", ["f32[10,64]"], TABLE + ROW),
        ("f32[1,64]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%outer", ["f32[10,64]", "s32[]"], 2 * ROW + 4),
        ("f32[10,64]{1,0} fusion(%p0, %p1, %p2), kind=kLoop, calls=%twice_updated",
         ["f32[10,64]", "f32[1,64]", "s32[]"], 3 * ROW + 4),
        # Of a weight in bfloat16, 4 of 10 rows.
        ("f32[2,4]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%sliced_and_multiplied",
         ["bf16[10,64]", "f32[2,64]"], 4 * 128 + 2 * ROW + 32),
        ("f32[5,128]{1,0} fusion(%p0), kind=kLoop, calls=%viewed", ["f32[10,64]"], 2 * TABLE),
        ("f32[640]{0} fusion(%p0), kind=kLoop, calls=%view", ["f32[10,64]"], 2 * TABLE),
        ("(bf16[8,32], s8[64]) custom-call(%p0, %p1), " + CUBLAS, ["bf16[8,16]", "bf16[16,32]"], 256 + 1024 + 512),
        ('f32[8] custom-call(%p0, %p1, %p0), custom_call_target="paged"', ["f32[10,64]", "f32[8]"], TABLE + 64),
        # A TPU: nothing is read from device memory, where the table is inside the chip.
        ("f32[8,128]{1,0:T(8,128)} negate(%p0)", ["f32[8,128]{1,0:T(8,128)S(1)}"], 4096),
        ("(f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p0)",
         ["f32[8,128]{1,0:T(8,128)}"], 4096),
        ("((f32[32,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p0), slice={[0:8]}",
         ["f32[32,128]{1,0:T(8,128)}"], 4096),
        ('bf16[9]{0} custom-call(%p0), custom_call_target="ConcatBitcast"', ["bf16[9]"], 0),
    ],
)  # fmt: skip
def test_traffic(line, parameters, traffic):
    assert one(line, *parameters, before=FUSIONS).bytes == traffic


LAUNCHES = """
  %p0 = f32[8,64]{1,0} parameter(0)
  %small.1 = f32[8,64]{1,0} negate(%p0)
  %seen = f32[512]{0} bitcast(%small.1)
  %start = (f32[8,64]{1,0}, f32[8,64]{1,0}) all-gather-start(%small.1), replica_groups={}, dimensions={0}
  %all = f32[8,64]{1,0} all-gather-done(%start)
  %large = f32[512,64]{1,0} broadcast(%seen), dimensions={0}
  ROOT %sum.2.clone = f32[512,64]{1,0} add(%large, %all)"""


@pytest.mark.parametrize(("cached_bytes", "far"), [(0, (1, 1, 1, 1)), (2048, (0.5, 0, 64 / 65, 128 / 129))])
def test_arrays_that_stay_in_a_cache_are_not_far(cached_bytes, far):
    """2 KiB fit: the first result, and the gathered one. The broadcast and the sum write 128 KiB."""
    launches = read(module(LAUNCHES)).launches
    assert [launch.label for launch in launches] == ["small", "start", "large", "sum"]
    assert [launch.bytes for launch in launches] == [4096, 4096, 65 * 2048, 129 * 2048]
    sizes = [sum(each.bytes for each in accesses(launch, cached_bytes) if not each.is_near) for launch in launches]
    assert [size / launch.bytes for size, launch in zip(sizes, launches, strict=True)] == pytest.approx(far)


def test_launches_are_inside_loops_and_conditionals_are_one():
    program = read(module(TURN, LOOP.format(dot=DOT, end="%end")))
    inside = (("while.1", 4),), 4
    assert {launch.label: (launch.loops, launch.times) for launch in program.launches} == {
        "copied": inside, "next": inside, "y": inside, "lt": ((), 5),
    }  # fmt: skip
    assert {launch.label: launch.flops for launch in program.launches if launch.flops} == {"y": 128}
    unknown = read(module(TURN, LOOP.format(dot=DOT, end="%next"))).launches
    assert [launch.opcode for launch in unknown if not launch.loops] == ["while"]
    given = "f32[4,4]{1,0} conditional(%p0, %p1, %p1), true_computation=%cheap, false_computation=%costly"
    branches = one(given, "s32[]", "(f32[4,4]{1,0})", before=BRANCHES).launches
    assert [launch.opcode for launch in branches] == ["conditional", "dot", "dot"]


REARRANGED = """
%joined (a: f32[4,8], b: f32[4,8]) -> f32[8,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %both = f32[8,8]{1,0} concatenate(%a, %b), dimensions={0}
  ROOT %n = f32[8,8]{1,0} negate(%both)
}

%multiplied (a: f32[4,8], b: f32[4,8]) -> f32[4,4] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %t = f32[8,4]{1,0} transpose(%b), dimensions={1,0}
  ROOT %d = f32[4,4]{1,0} dot(%a, %t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%updated (a: f32[4,8], b: f32[1,8], i: s32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %new = f32[4,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)
}

%copied_and_updated (a: f32[4,8], b: f32[1,8], i: s32[]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %c = f32[4,8]{1,0} copy(%a)
  ROOT %new = f32[4,8]{1,0} dynamic-update-slice(%c, %b, %i, %i)
}
"""


@pytest.mark.parametrize(
    ("line", "parameters", "found"),
    [
        ("f32[4,8]{0,1} copy(%p0)", ["f32[4,8]"], [("copy", "f32[4,8]")]),
        ("f32[4,8]{1,0} negate(%p0)", ["f32[4,8]"], []),
        ("f32[8,8]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%joined", ["f32[4,8]"] * 2, [("concatenate", "f32[8,8]")]),
        ("f32[4,4]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%multiplied", ["f32[4,8]"] * 2, []),
        ("f32[4,8] fusion(%p0, %p1, %p2), kind=kLoop, calls=%updated", ["f32[4,8]", "f32[1,8]", "s32[]"], []),
        (
            "f32[4,8] fusion(%p0, %p1, %p2), kind=kLoop, calls=%copied_and_updated",
            ["f32[4,8]", "f32[1,8]", "s32[]"],
            [("copy", "f32[4,8]")],
        ),
        # A TPU: into the memory inside the chip.
        ("f32[8,128]{1,0:T(8,128)S(1)} copy(%p0)", ["f32[8,128]{1,0:T(8,128)}"], []),
    ],
)
def test_arrays_that_are_written_in_another_order(line, parameters, found):
    (launch,) = one(line, *parameters, before=REARRANGED).launches
    assert [(opcode, str(array)) for opcode, array in rearranged(launch.instruction)] == found


EIGHT = "HloModule m, num_partitions=8"


@pytest.mark.parametrize(
    ("line", "kind", "size", "group"),
    [
        ("f32[32]{0} all-gather(%p0), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}", "all-gather", 128, 2),
        ("f32[32]{0} all-gather(%p0), replica_groups=[2,4]<=[8]T(1,0), dimensions={0}", "all-gather", 128, 4),
        ("f32[32]{0} all-gather(%p0), replica_groups=mesh['a'=2,'b'=4] {'b'}", "all-gather", 128, 4),
        ("f32[32]{0} all-gather(%p0), replica_groups=mesh['a'=2,'b'=4] {'a','b'}", "all-gather", 128, 8),
        ("f32[32]{0} all-gather(%p0), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", "all-gather", 128, 2),
        ("f32[32] all-gather(%p0), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
         "all-gather", 128, 4),
        ("f32[16]{0} all-reduce(%p0), replica_groups={}, to_apply=%add", "all-reduce", 64, 8),
        ("f32[2]{0} reduce-scatter(%p0), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add", "reduce-scatter", 64, 8),
        ("f32[16]{0} all-to-all(%p0), replica_groups=[1,8]<=[8], dimensions={0}", "all-to-all", 64, 8),
        ("f32[16]{0} collective-permute(%p0), source_target_pairs={{0,1},{1,2},{2,0}}", "collective-permute", 64, 3),
        ("f32[16]{0} all-reduce-start(%p0), replica_groups=[1,8]<=[8], to_apply=%add", "all-reduce", 64, 8),
        ("(f32[16]{0}, f32[32]{0}) all-gather-start(%p0), replica_groups=[4,2]<=[8]", "all-gather", 128, 2),
        ("((f32[16]{0}, f32[16]{0}), (f32[2]{0}, f32[2]{0})) reduce-scatter-start(%p0, %p0), "
         "replica_groups=[1,8]<=[8], to_apply=%add", "reduce-scatter", 128, 8),
        ("(f32[16]{0}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p0), "
         "source_target_pairs={{0,1},{1,0}}", "collective-permute", 64, 2),
    ],
)  # fmt: skip
def test_collectives(line, kind, size, group):
    program = one(line, "f32[16]{0}", header=EIGHT)
    assert [(c.kind, c.bytes, c.group_size, c.times) for c in program.collectives] == [(kind, size, group, 1)]


CUT = """
%cut (a: f32[32,4]) -> f32[8,4] {
  %a = f32[32,4]{1,0} parameter(0)
  %sum = f32[32,4]{1,0} all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add
  %i = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %mine = f32[8,4]{1,0} dynamic-slice(%sum, %i, %zero), dynamic_slice_sizes={8,4}
}

%done (a: f32[8]{0}, b: f32[32]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %all = f32[32]{0} all-gather(%a), replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="0"}
  ROOT %ended = f32[32]{0} custom-call(%a, %b, %all), custom_call_target="AsyncCollectiveDone"
}
"""


def test_a_fusion_that_reduces_and_slices_scatters():
    program = one("f32[8,4]{1,0} fusion(%p0), kind=kCustom, calls=%cut", "f32[32,4]", before=CUT)
    assert [(c.kind, c.bytes, c.group_size) for c in program.collectives] == [("reduce-scatter", 512, 4)]
    assert program.bytes == 512 + 128


def test_a_fusion_that_ends_a_collective_costs_nothing():
    line = "f32[32]{0} fusion(%p0, %p1), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done"
    program = one(line, "f32[8]", "f32[32]", before=CUT)
    assert (program.bytes, program.collectives, program.arrays) == (0, [], [])


def test_an_instruction_over_several_lines_with_braces_in_strings():
    line = r"""f32[4]{0} custom-call(%p0), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof":"{\"block\": 128, \"open\": {"
}}, metadata={op_name="jit(f)/jvp(attend)/attend_fwd/pallas_call"}, backend_config={"body":"}}{ROOT %x = (","n":"1"}"""
    program = one(line, "f32[4]{0}")
    assert program.kernels == [("tpu_custom_call", "attend_fwd", 1)]
    assert program.bytes == 32


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (module("  ROOT %p = f32[2]{0} parameter(0)\n  an unknown line"), "an unknown line"),
        (module("  ROOT %p = f32[two]{0} parameter(0)"), "f32.two"),
        (module("  ROOT %p = float[2]{0} parameter(0)"), "float"),
        (module("  ROOT %p = (f32[2]{0} parameter(0)"), "%p = .f32"),
        (module("  %p = f32[2] parameter(0)\n  ROOT %a = f32[2] all-reduce(%p), replica_groups=other"), "other"),
        ("HloModule m\n", "ENTRY"),
        ("HloModule m\nnonsense\n", "nonsense"),
        (module("  ROOT %p = f32[2]{0} parameter(0), sharding={"), "HloModule m"),
    ],
)
def test_what_cannot_be_read_is_quoted(text, quoted):
    with pytest.raises(ValueError, match=quoted):
        read(text)


# Programs that compilers made for a TPU v5e and an H200.


def excerpt(name):
    return read((DATA / f"{name}.hlo").read_text())


@pytest.mark.parametrize("name", ["v5e_scan", "h200_scan", "h200_scan_cublas"])
def test_layers_gathered_in_a_loop(name):
    """Six layers of two products; kernels lie in float32 over eight devices, and are gathered in bfloat16."""
    program = excerpt(name)
    assert program.flops == 12 * 2 * 4096 * 2048 * 2048
    assert [loop.trips for (loop,) in loops(program)] == [6]
    ((kind, (array,), group_size, times),) = program.collectives
    assert (kind, array.dtype, group_size, times) == ("all-gather", "bf16", 8, 6)
    assert array.bytes == 2 * 2048 * 2048 * 2
    assert [str(array) for array in program.arguments] == ["f32[6,2,256,2048]", "bf16[4096,2048]"]
    assert sum(array.bytes for array in program.arguments) == 41943040  # of `memory_analysis()`
    assert not [array for array in program.arrays if array.shape == (6, 2, 2048, 2048)]
    # XLA for GPUs brings the gathered dimension of the stacked layers to the front, once, before the loop.
    outside = [launch for launch in program.launches if not launch.loops and launch.instruction is not None]
    found = {str(array) for launch in outside for _, array in rearranged(launch.instruction)}
    assert ("f32[256,6,2,2048]" in found) == (name != "v5e_scan")


def test_products_with_two_batch_dimensions_on_a_tpu():
    program = excerpt("v5e_batched")
    assert [launch.flops for launch in program.launches if launch.flops] == [2 * 64 * 256 * 128 * 512] * 2
    # Both arguments move into the chip; one product reads one of them again. Both results are written.
    lhs, rhs, results = 64 * 256 * 128 * 2, 64 * 128 * 512 * 2, (64 + 1) * 256 * 512 * 2
    assert program.bytes == 2 * lhs + rhs + results


@pytest.mark.parametrize(("name", "argument_bytes"), [("v5e_branches", 8389120), ("h200_branches", 8388612)])
def test_branches_and_a_loop_of_unknown_length(name, argument_bytes):
    """One branch has two products, the other none; the loop, with one, ends at an argument."""
    program = excerpt(name)
    assert program.flops == 3 * 2 * 2048**3
    assert [loop.trips for (loop,) in loops(program)] == [None]
    assert sum(array.bytes for array in program.arguments) == argument_bytes  # of `memory_analysis()`


@pytest.mark.parametrize(
    ("name", "target", "kernels"),
    [
        (
            "v5e_splash",
            "tpu_custom_call",
            [
                "splash_mha_fwd_segmented_residuals",
                "splash_mha_dkv_segmented_no_residuals",
                "splash_mha_dq_segmented_no_residuals",
            ],
        ),
        ("h200_cudnn", "__cudnn$fmhaSoftmax", ["dot_product_attention_fwd", "dot_product_attention_bwd"]),
        ("h200_pallas", "__gpu$xla.gpu.triton", ["mha_forward", "mha_preprocess_backward", "mha_backward"]),
    ],
)
def test_kernels_of_attention(name, target, kernels):
    """Forward and gradient of 2 rows of 2,048 tokens, of which no scores are in memory."""
    program = excerpt(name)
    assert [kernel.name for kernel in program.kernels] == kernels
    assert all(kernel.target.startswith(target) and kernel.times == 1 for kernel in program.kernels)
    assert not [array for array in program.arrays if array.shape[-2:] == (2048, 2048)]


def test_a_collective_that_several_fusions_name_counts_once():
    """A layer is gathered while another is used: three fusions name the all-gather. Two gradients are scattered."""
    program = excerpt("v5e_shared_collective")
    found = {(c.kind, tuple(map(str, c.arrays)), c.group_size, c.times) for c in program.collectives}
    assert found == {
        ("all-gather", ("bf16[1,1024,1024]",), 8, 1),
        ("reduce-scatter", ("bf16[1024,3072]", "bf16[1024,1024]"), 8, 1),
    }
    assert program.flops == 2 * 8192 * 1024 * 1024
    assert program.bytes == 8192 * 1024 * 2  # the saved product; all else is inside the chip


# Programs that jax compiles for the CPU.


def compiled(function, *shapes, **options):
    structs = [jax.ShapeDtypeStruct(*shape) if isinstance(shape, tuple) else shape for shape in shapes]
    return read(jax.jit(function, **options).lower(*structs).compile().as_text())


X, W = ((32, 64), jnp.float32), ((5, 64, 64), jnp.float32)
XW = 2 * 32 * 64 * 64


def scanned(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def test_a_scan():
    program = compiled(scanned, X, W)
    assert program.flops == 5 * XW
    assert [loop.trips for (loop,) in loops(program)] == [5]
    assert [str(array) for array in program.arguments] == ["f32[32,64]", "f32[5,64,64]"]


def test_a_scan_in_a_scan():
    def inner(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)

    program = compiled(lambda x, w: jax.lax.scan(inner, x, w)[0], X, W)
    assert program.flops == 15 * XW
    assert {tuple(loop.trips for loop in each) for each in loops(program)} == {(5,), (5, 3)}


def test_a_loop_with_an_end_that_is_computed():
    def turn(x, w, n):
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w[0]), x)

    program = compiled(turn, X, W, ((), jnp.int32))
    assert program.flops == XW
    assert [loop.trips for (loop,) in loops(program)] == [None]


@pytest.mark.parametrize(("is_remat", "products"), [(False, 6), (True, 7)])
def test_gradient_of_two_layers(is_remat, products):
    """Two products forward, two more for each in the gradient; with remat the first again, the second not."""

    def loss(w, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w[0]) @ w[1], None

        return (jax.lax.scan(jax.checkpoint(layer) if is_remat else layer, x, w)[0] ** 2).sum()

    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((5, 64, 128), (5, 128, 64)))
    program = read(jax.jit(jax.grad(loss)).lower((up, down), jax.ShapeDtypeStruct(*X)).compile().as_text())
    assert program.flops == products * 5 * 2 * 32 * 64 * 128


def test_a_conditional():
    def choose(n, x, w):
        return jax.lax.cond(n > 0, lambda: x @ w[0] @ w[1], lambda: x @ w[0])

    assert compiled(choose, ((), jnp.int32), X, W).flops == 2 * XW


def test_traffic_without_loops_is_that_of_xla():
    """XLA counts scatters as if they were not in place, so there is none here."""

    def loss(w, x):
        for kernel in w:
            x = x + jax.nn.silu(x @ kernel) * x.mean(0)
        return (x[:, :8] ** 2).sum()

    program = jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct(*W), jax.ShapeDtypeStruct(*X)).compile()
    assert read(program.as_text()).bytes == program.cost_analysis()["bytes accessed"]


def test_arrays_in_memory():
    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    program = compiled(attend, *[((96, 8), jnp.float32)] * 3)
    assert program.arrays[0].shape == (96, 96)
    assert not [array for array in compiled(scanned, X, W).arrays if array.shape == (5, 64, 64)]


SHARDED = """
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

def shape(sizes, *spec):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

def forward(x, w):
    def layer(x, w):
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))), None
    return jax.lax.scan(layer, x, w)[0]

def gradient(x, w):
    return jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)

def scatter(x):
    return jax.shard_map(lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True), mesh=mesh, in_specs=P("data"),
                         out_specs=P(("data", "fsdp")))(x)

x = shape((16, 32), ("data", "fsdp"))
print(json.dumps([jax.jit(f, **options).lower(*shapes).compile().as_text() for f, shapes, options in (
    (forward, (x, shape((5, 32, 32), None, "fsdp")), {}),
    (gradient, (x, shape((32, 32))), {"out_shardings": NamedSharding(mesh, P())}),
    (scatter, (shape((16, 32), "data"),), {}),
)]))
"""


@pytest.mark.slow
def test_collectives_of_eight_devices():
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    forward, gradient, scatter = (read(text) for text in json.loads(ended.stdout))
    found = [
        [(c.kind, [str(array) for array in c.arrays], c.bytes, c.group_size, c.times) for c in program.collectives]
        for program in (forward, gradient, scatter)
    ]
    assert found == [
        [("all-gather", ["f32[1,32,32]"], 4096, 4, 5)],
        [("all-reduce", ["f32[32,32]"], 4096, 8, 1)],
        [("reduce-scatter", ["f32[8,32]"], 1024, 4, 1)],
    ]
    assert forward.flops == 5 * 2 * 2 * 32 * 32  # two rows on a device
    assert [str(array) for array in forward.arguments] == ["f32[2,32]", "f32[5,8,32]"]

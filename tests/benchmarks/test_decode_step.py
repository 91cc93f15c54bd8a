"""A step of decoding, read from programs with pages of keys: one written by hand, two as compilers made them.

The latter are one layer and a head with the widths of Qwen3-0.6B and a small vocabulary, for 32 rows
(`data`, from which kernels' code, source locations and tuning were cut).
"""

from pathlib import Path

import pytest

from decode_step import CACHED_BYTES, LargeCopy, decode_step, large_copies, main_loop
from hlo import read

DATA = Path(__file__).parent / "data"
PAGES = "bf16[2,64,64,16]{3,2,1,0}"  # [kv heads, pages, tokens, head width]: 256 KiB
POOL_BYTES = 2 * 64 * 64 * 16 * 2
TABLE = "s32[4,16]{1,0}"

DECODE = f"""HloModule decode

%put_keys (pages: {PAGES}, new: bf16[2,4,16], places: s32[4]) -> {PAGES} {{
  %pages = {PAGES} parameter(0)
  %new = bf16[2,4,16]{{2,1,0}} parameter(1)
  %places = s32[4]{{0}} parameter(2)
  %seen = bf16[2,4096,16]{{2,1,0}} bitcast(%pages)
  %put = bf16[2,4096,16]{{2,1,0}} scatter(%seen, %places, %new), to_apply=%take_new
  ROOT %again = {PAGES} bitcast(%put)
}}

%body (c: (s32[], {PAGES}, bf16[4,32], bf16[32,32], {TABLE})) -> (s32[], {PAGES}, bf16[4,32], bf16[32,32], {TABLE}) {{
  %c = (s32[], {PAGES}, bf16[4,32]{{1,0}}, bf16[32,32]{{1,0}}, {TABLE}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %pages.1 = {PAGES} get-tuple-element(%c), index=1
  %x = bf16[4,32]{{1,0}} get-tuple-element(%c), index=2
  %w = bf16[32,32]{{1,0}} get-tuple-element(%c), index=3
  %table = {TABLE} get-tuple-element(%c), index=4
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %gemm_fusion_dot.1 = bf16[4,32]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %new.1 = bf16[2,4,16]{{2,1,0}} bitcast(%gemm_fusion_dot.1)
  %places.1 = s32[4]{{0}} slice(%table), slice={{[0:4], [0:1]}}
  %input_scatter_fusion.3 = {PAGES} fusion(%pages.1, %new.1, %places.1), kind=kInput, calls=%put_keys
  %attended = bf16[4,32]{{1,0}} custom-call(%gemm_fusion_dot.1, %input_scatter_fusion.3, %table),
    custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="jit(decode)/while/body/paged_attention/pallas_call"}}
  %gemm_fusion_dot.2 = bf16[4,32]{{1,0}} dot(%attended, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], {PAGES}, bf16[4,32]{{1,0}}, bf16[32,32]{{1,0}}, {TABLE}) tuple(%next, %input_scatter_fusion.3,
    %gemm_fusion_dot.2, %w, %table)
}}

%condition (c: (s32[], {PAGES}, bf16[4,32], bf16[32,32], {TABLE})) -> pred[] {{
  %c.1 = (s32[], {PAGES}, bf16[4,32]{{1,0}}, bf16[32,32]{{1,0}}, {TABLE}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  %eight = s32[] constant(8)
  ROOT %lt = pred[] compare(%i.1, %eight), direction=LT
}}

ENTRY %main (p0: {PAGES}, p1: bf16[4,32], p2: bf16[32,32], p3: {TABLE}) -> {PAGES} {{
  %p0 = {PAGES} parameter(0)
  %p1 = bf16[4,32]{{1,0}} parameter(1)
  %p2 = bf16[32,32]{{1,0}} parameter(2)
  %p3 = {TABLE} parameter(3)
  %zero = s32[] constant(0)
  %copy.7 = {PAGES} copy(%p0)
  %t.2 = (s32[], {PAGES}, bf16[4,32]{{1,0}}, bf16[32,32]{{1,0}}, {TABLE}) tuple(%zero, %copy.7, %p1, %p2, %p3)
  %while.1 = (s32[], {PAGES}, bf16[4,32]{{1,0}}, bf16[32,32]{{1,0}}, {TABLE}) while(%t.2), condition=%condition,
    body=%body, backend_config={{"known_trip_count":{{"n":"8"}}}}
  ROOT %out = {PAGES} get-tuple-element(%while.1), index=1
}}
""".replace(",\n   ", ",")

X, W, ROWS = 4 * 32 * 2, 32 * 32 * 2, 4 * 4
TABLE_BYTES = 4 * 16 * 4
PRODUCT = X + W + X


def test_a_step_is_one_turn_without_the_bytes_of_attention():
    step = decode_step(read(DECODE), POOL_BYTES)
    assert step.trips == 8
    assert step.counts == {
        "next": 1, "gemm_fusion_dot": 2, "places": 1, "input_scatter_fusion": 1, "paged_attention": 1,
    }  # fmt: skip
    assert [each.label for each in step.launches if each.is_attention] == ["paged_attention"]
    assert step.attention_bytes == X + TABLE_BYTES + X
    # The update of the pages reads and writes four tokens, not the pool.
    assert step.bytes == step.far_bytes == 3 * 4 + 2 * PRODUCT + 2 * ROWS + (X + ROWS + X)


def test_arrays_of_a_step_in_the_cache_are_not_far():
    step = decode_step(read(DECODE), POOL_BYTES, cached_bytes=4096)
    # The first product writes a cached array, which attention and the update read; attention's result is read.
    assert step.far_bytes == 3 * 4 + (X + W) + (W + X) + ROWS + X
    assert step.attention_bytes == TABLE_BYTES


def test_without_the_size_of_the_pool_no_kernel_is_attention():
    step = decode_step(read(DECODE), 0)
    assert not any(each.is_attention for each in step.launches)
    assert step.bytes > POOL_BYTES


def test_large_copies_name_their_place():
    found = large_copies(read(DECODE), POOL_BYTES // 100)
    assert found == [LargeCopy("entry", "copy", "copy", "bf16[2,64,64,16]", POOL_BYTES)]
    assert large_copies(read(DECODE), POOL_BYTES + 1) == []
    doubled = DECODE.replace("ROOT %out = ", "%out = ")
    after = doubled.replace("index=1\n}\n", f"index=1\n  ROOT %copy.8 = {PAGES} copy(%out)\n}}\n")
    assert [each.where for each in large_copies(read(after), 2600)] == ["entry", "exit"]


@pytest.mark.parametrize(("name", "cached_bytes"), [("h200_pages", CACHED_BYTES), ("v5e_pages", 0)])
def test_a_compiled_step_reads_its_weights_once_and_copies_no_pages(name, cached_bytes):
    program = read((DATA / f"{name}.hlo").read_text())
    pool = 8 * 512 * 64 * 128 * 2
    step = decode_step(program, pool, cached_bytes)
    weights = 2 * 1024 * (4096 + 2048 + 6144 + 3072 + 32768)
    assert step.trips == 8 and large_copies(program, pool // 100) == []
    assert step.far_bytes == pytest.approx(weights, rel=0.003)
    (kernel,) = [each for each in step.launches if each.is_attention]
    assert kernel.label.startswith("paged_attention") and kernel.times == 1
    # On the GPU only the table of pages is beside them: sums of parts of a row stay in the cache.
    assert step.attention_bytes < (4 * 32 * 17 if cached_bytes else 3 * 32 * 16 * 128 * 4)


@pytest.mark.parametrize("name", ["h200_scan", "v5e_scan"])
def test_the_main_loop_is_the_one_with_the_products(name):
    program = read((DATA / f"{name}.hlo").read_text())
    assert main_loop(program).trips == 6
    assert sum(each.times for each in decode_step(program, 0).launches) >= 2


def test_a_program_without_a_loop_has_no_step():
    program = read((DATA / "v5e_batched.hlo").read_text())
    assert decode_step(program, 1) is None

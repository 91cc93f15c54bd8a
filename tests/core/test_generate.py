"""Sampling whole completions: shapes, the ends of rows, and rows that other prompts leave unchanged."""

import inspect
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.core.generate import _places, generate, prompt_ids
from jaxft.core.logprobs import token_logprobs
from jaxft.core.types import FinishReason
from jaxft.models.bridge import from_function
from jaxft.rollout.device import CompileCounter

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7]]
NEW = 6
KEY = jax.random.key(11)


def run(tiny, prompts=PROMPTS, key=KEY, num_generations=2, **knobs):
    return jax.device_get(generate(*tiny, prompts, key, num_generations=num_generations, max_new_tokens=NEW, **knobs))


@pytest.fixture(scope="module")
def rollout(tiny):
    return run(tiny)


def completion(rollout, row):
    return rollout.tokens[row][rollout.completion_mask[row]]


def assert_same_bits(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_rows_are_prompts_and_their_completions(rollout):
    assert rollout.tokens.shape == rollout.completion_mask.shape == (6, 32 + NEW)
    assert rollout.lengths.shape == rollout.finish_reason.shape == (6,)
    for row in range(6):
        prompt = PROMPTS[row // 2]  # prompt-major
        start, end = len(prompt), len(prompt) + NEW
        np.testing.assert_array_equal(rollout.tokens[row, :start], prompt)
        np.testing.assert_array_equal(np.flatnonzero(rollout.completion_mask[row]), np.arange(start, end))
        assert rollout.lengths[row] == end
        assert not rollout.tokens[row, end:].any()
        assert rollout.finish_reason[row] == FinishReason.LENGTH
    for logprobs in (rollout.sampler_logprobs, rollout.behavior_logprobs):
        assert np.all(logprobs[~rollout.completion_mask] == 0)
        assert np.all(logprobs[rollout.completion_mask] < 0)


def test_prompts_may_be_arrays_or_one_alone():
    same = [PROMPTS[0]] * 3
    for prompts in (same, np.array(same), jnp.array(same), list(np.array(same)), tuple(map(tuple, same))):
        assert [prompt.tolist() for prompt in prompt_ids(prompts, 48)] == same
    for prompt in (PROMPTS[0], np.array(PROMPTS[0]), jnp.array(PROMPTS[0])):
        assert [prompt.tolist() for prompt in prompt_ids(prompt, 48)] == same[:1]


@pytest.mark.parametrize(
    ("prompts", "key", "parts"),
    [
        ("a text", KEY, ("prompts[0]", "token ids")),
        ([[1], "a text"], KEY, ("prompts[1]", "token ids")),
        ([["a", "b"]], KEY, ("prompts[0]", "token ids")),
        ([], KEY, ("prompts is empty",)),
        (np.zeros((0, 3), int), KEY, ("prompts is empty",)),
        ([[1], []], KEY, ("prompts[1]",)),
        ([[1.0, 2.0]], KEY, ("prompts[0] holds float64",)),
        (np.zeros((1, 2, 3), int), KEY, ("prompts[0]", "a row of token ids")),
        ([[[1, 2], [3, 4]]], KEY, ("prompts[0]", "a row of token ids")),
        (np.array([[True]]), KEY, ("prompts[0] holds bool",)),
        ([np.array([1]), 3], KEY, ("prompts[1] is 3",)),
        ([3, jnp.array([1])], KEY, ("prompts[0] is 3",)),
        ({"input_ids": [1]}, KEY, ("prompts is {'input_ids': [1]}",)),
        (np.array(5), KEY, ("prompts is array(5)",)),
        (b"text", KEY, ("prompts[0]", "token ids")),
        ([[1, 2], [3, 48]], KEY, ("prompts[1][1]", "48", "0 to 47")),
        ([[-1]], KEY, ("prompts[0]", "-1")),
        (PROMPTS, 7, ("key is 7", "jax.random.key(")),
        (PROMPTS, np.array(7), ("key is an array", "jax.random.key(")),
        (PROMPTS, np.zeros((2, 2), np.uint32), ("key holds 2 keys",)),
    ],
)
def test_malformed_prompts_and_keys_are_refused_by_name(tiny, prompts, key, parts):
    as_users_call = inspect.unwrap(generate)  # without the checks of annotations that a test session adds
    with pytest.raises(ValueError) as caught:
        as_users_call(*tiny, prompts, key, max_new_tokens=NEW)
    assert all(part in str(caught.value) for part in parts)


def test_prompts_on_a_device_are_read_once(monkeypatch):
    """Reading token by token would slice an array for each."""
    prompts, table = [jnp.arange(40), jnp.arange(30)], jnp.array(np.arange(40).reshape(4, 10))
    with monkeypatch.context() as patched:
        patched.setattr(type(prompts[0]), "__iter__", lambda x: pytest.fail("walked on the device"))
        patched.setattr(type(prompts[0]), "__getitem__", lambda x, place: pytest.fail("cut on the device"))
        rows = [prompt_ids(given, 48) for given in (prompts, prompts[0], table)]
    assert [len(found) for found in rows] == [2, 1, 4]


def test_equal_keys_give_equal_bits(tiny, rollout):
    assert_same_bits(run(tiny), rollout)
    assert not np.array_equal(run(tiny, key=jax.random.key(12)).tokens, rollout.tokens)


def test_other_prompts_in_the_same_shape_change_no_bit(tiny, rollout):
    changed = run(tiny, prompts=[[8] * 20, PROMPTS[1], [3]])
    assert_same_bits(jax.tree.map(lambda x: x[2:4], changed), jax.tree.map(lambda x: x[2:4], rollout))


def test_keys_of_the_older_kind_draw_the_same(tiny, rollout):
    assert_same_bits(run(tiny, key=jax.random.PRNGKey(11)), rollout)


def test_a_stop_token_ends_its_row_and_belongs_to_it(tiny, rollout):
    completions = [completion(rollout, row).tolist() for row in range(6)]
    # One that comes last in its row: the row stops on its very limit. And one that comes early.
    last = next(tokens[-1] for tokens in completions if tokens[-1] not in tokens[:-1])
    early = next(tokens[1] for tokens in completions if tokens[1] != tokens[0] and tokens[1] != last)
    ended_on_limit = 0
    for stop in (last, early):
        stopped = run(tiny, stop_ids=(stop,))
        for row, tokens in enumerate(completions):
            is_stopped = stop in tokens
            kept = tokens[: tokens.index(stop) + 1] if is_stopped else tokens
            np.testing.assert_array_equal(completion(stopped, row), kept)
            assert stopped.lengths[row] == len(PROMPTS[row // 2]) + len(kept)
            assert stopped.finish_reason[row] == (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
            assert not stopped.tokens[row, stopped.lengths[row] :].any()
            np.testing.assert_array_equal(
                stopped.sampler_logprobs[row][stopped.completion_mask[row]],
                rollout.sampler_logprobs[row][rollout.completion_mask[row]][: len(kept)],
            )
            ended_on_limit += is_stopped and len(kept) == NEW
    assert ended_on_limit


def test_greedy_rows_follow_the_largest_logit(tiny):
    model, params = tiny
    greedy = run(tiny, temperature=0.0)
    tokens, positions = greedy.tokens, np.broadcast_to(np.arange(32 + NEW), greedy.tokens.shape)

    @jax.jit
    def logits(params, tokens, positions):
        return model.unembed(params, model.apply(params, tokens, positions)[0])

    best = np.asarray(logits(params, tokens, positions)).argmax(-1)
    mask = greedy.completion_mask
    np.testing.assert_array_equal(tokens[mask], best[:, :-1][mask[:, 1:]])
    np.testing.assert_array_equal(greedy.behavior_logprobs, greedy.sampler_logprobs)


def test_filters_show_in_the_behavior_logprobs(tiny, rollout):
    one_choice = run(tiny, top_k=1)
    assert np.all(one_choice.behavior_logprobs == 0)
    assert np.all(one_choice.sampler_logprobs[one_choice.completion_mask] < 0)
    np.testing.assert_array_equal(one_choice.tokens[0::2], one_choice.tokens[1::2])


# --- Pages and calls, of networks that say how they are run.


def sure_of_the_next(params, tokens, positions):
    """Predict the token after each with certainty, the first again after the last."""
    return params["scale"] * jax.nn.one_hot((tokens + 1) % 48, 48)


SURE = {"scale": np.array(1e3, np.float32)}


def test_prompts_are_prefilled_once_and_calls_end_with_their_rows():
    """A call samples 16 tokens of each row; at most one more is made after the last row has ended.

    Nothing compiles again for other lengths, such as those whose last page needs no copy, as it is empty.
    """
    rows = []

    def network(params, tokens, positions):
        jax.debug.callback(rows.append, len(tokens))
        return sure_of_the_next(params, tokens, positions)

    model = from_function(network)

    def ask(lengths, first, stop):
        """Ask for rows that count from `first` to `stop`; return the calls after the prefill of two pieces."""
        rows.clear()
        prompts = [[first] * length for length in lengths]
        knobs = {"num_generations": 2, "max_new_tokens": 160, "stop_ids": (stop,)}
        rollout = jax.device_get(generate(model, SURE, prompts, KEY, **knobs))
        jax.effects_barrier()
        assert rollout.completion_mask.sum(axis=1).tolist() == [160 if stop < 0 else stop - first] * 6
        sizes = [int(size) for size in rows]
        assert sizes[:2] == [3, 3] and set(sizes[2:]) == {6}
        return (len(sizes) - 2) / 16

    assert ask([66, 67, 68], 4, stop=9) == 2
    with closing(CompileCounter()) as compiles:
        assert ask([65, 66, 65], 4, stop=20) == 2
        assert ask([65, 65, 65], 4, stop=21) == 3
        assert ask([66, 65, 70], 7, stop=47) == 4
        assert ask([66, 65, 70], 7, stop=-1) == 10
    assert compiles.names(0) == []


LONG = [65, 64, 63, 129, 1, 128]
"""Lengths of prompts around the ends of pages."""


@pytest.fixture(scope="module")
def long_rollout(tiny):
    return run_long(tiny, LONG)


def run_long(tiny, lengths):
    prompts = [[(5 * place + length) % 48 for place in range(length)] for length in lengths]
    return jax.device_get(generate(*tiny, prompts, KEY, num_generations=3, max_new_tokens=40))


def test_rows_cross_pages_wherever_their_prompts_end(tiny, long_rollout):
    assert long_rollout.lengths.tolist() == [length + 40 for length in LONG for _ in range(3)]
    assert len({tuple(row[65:105].tolist()) for row in long_rollout.tokens[:3]}) == 3
    model, params = tiny
    scored = jax.jit(token_logprobs, static_argnums=0)(model, params, long_rollout.tokens)
    difference = np.abs(scored.logprobs - long_rollout.sampler_logprobs)[long_rollout.completion_mask]
    assert difference.size and float(difference.max()) <= 1e-5


def test_generations_share_the_pages_of_their_prompt():
    """Prompts of 130 and 140 tokens have two whole pages. The other tokens of each row are in one page of its own."""
    places = _places(np.array([130, 140]), 8, width=160, new_tokens=9, shards=1)
    assert places.num_pages == 2 * 3 + 16 and places.tables.shape == (16, 3)
    for prompt in (places.tables[:8], places.tables[8:]):
        assert len(set(map(tuple, prompt[:, :2]))) == 1 and len(set(prompt[:, 2])) == 8


def test_pages_of_a_row_are_in_the_part_of_its_shard():
    """Three prompts on two shards, which share the second; copies are numbered within a shard."""
    places = _places(np.array([130, 140, 20]), 2, width=160, new_tokens=9, shards=2)
    half = places.num_pages // 2
    for tables in (places.tables, places.prompt_tables):
        assert [set(part.ravel() // half) for part in np.split(tables, 2)] == [{0}, {1}]
    np.testing.assert_array_equal(places.tables[3, :2], places.prompt_tables[len(places.prompt_tables) // 2, :2])
    assert places.sources.shape == places.targets.shape == (2, 1)
    assert places.targets.tolist() == [[places.tables[1, 2]], [places.tables[5, 0] - half]]


def test_longer_and_shorter_prompts_beside_it_change_no_bit_of_a_row(tiny, long_rollout):
    """Also where these prompts share fewer pages: the keys of a row are those of its place in the batch."""
    changed = run_long(tiny, [65, 2, 63, 140, 150, 128])
    for prompt in (0, 2, 5):
        for row in range(3 * prompt, 3 * prompt + 3):
            length = LONG[prompt] + 40
            for name in ("tokens", "completion_mask", "sampler_logprobs", "behavior_logprobs"):
                found, expected = getattr(changed, name)[row], getattr(long_rollout, name)[row]
                np.testing.assert_array_equal(found[:length], expected[:length])


@pytest.mark.parametrize(
    ("prompts", "knobs", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, r"prompts\[1\] is \[\]; wanted a row of token ids"),
        ([[1]], dict(num_generations=0), "num_generations is 0, max_new_tokens 4; .* 1"),
        ([[1]], dict(max_new_tokens=0), "num_generations is 1, max_new_tokens 0; .* 1"),
        ([[1]], dict(temperature=-1.0), "temperature is -1.0; "),
        ([[1]], dict(top_p=0.0), "top_p is 0.0; "),
    ],
)
def test_impossible_parameters_are_refused(tiny, prompts, knobs, message):
    with pytest.raises(ValueError, match=message):
        generate(*tiny, prompts, KEY, **(dict(max_new_tokens=4) | knobs))

"""Requests of several adapters in one batch: each gets the bits that it gets alone."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxft.core.cache import own_tables
from jaxft.errors import NonFiniteError
from jaxft.models.config import LayerKind, LoraSpec
from jaxft.models.decoder import decoder, parameter_shapes
from jaxft.rollout.adapters import LEAST_PLACES, AdapterStack
from tests.rollout.test_engine import record_of, request, run, varied_requests
from tests.serving.test_adapters import SPECS


def draw_adapter(policy, number, lora):
    draw, shapes = np.random.default_rng(number), parameter_shapes(policy.model.config, lora)["adapter"]
    return jax.tree.map(lambda leaf: draw.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def make_adapters():
    def make(policy, *specs):
        async def main():
            drawn = [(lora, draw_adapter(policy, number, lora)) for number, lora in enumerate(specs)]
            return [await policy.add_adapter(*each) for each in drawn]

        return asyncio.run(main())

    return make


@pytest.fixture(scope="module")
def adapters(policy, make_adapters):
    """Six adapters of two ranks, more than a stack has places."""
    return make_adapters(policy, *[SPECS["second"], SPECS["first"]] * 3)


def asked(number, adapter, **changes):
    return request(number, **({"max_tokens": 16, "adapter": adapter} | changes))


def test_requests_of_several_adapters_get_the_bits_that_each_gets_alone(policy, serve, adapters):
    lengths = 5, 1, 70, 5, 40
    requests = [asked(3, adapter, prompt_tokens=n) for n, adapter in zip(lengths, [None, *adapters[:4]], strict=True)]
    alone = [record_of(serve(policy, each)[0]) for each in requests]
    assert [*map(record_of, serve(policy, *requests, *requests[::-1][2:]))] == [*alone, *alone[::-1][2:]]
    assert len({tuple(logprobs) for _, logprobs, *_ in alone}) == 5
    assert policy.engine._runner._adapters._places.keys() >= {each.number for each in adapters[:4]}


def test_a_prompt_is_read_again_with_another_adapter_and_once_with_the_same(policy, serve, adapters):
    requests, counts = [asked(9, each, prompt_tokens=80) for each in (None, *adapters[:2])], policy.engine.counts
    before = replace(counts)
    first = [record_of(serve(policy, each)[0]) for each in requests]
    assert counts.reused_tokens == before.reused_tokens
    again = [record_of(each) for each in serve(policy, *requests)]
    assert counts.prefilled_tokens == before.prefilled_tokens + 3 * 79 and first == again


def test_places_are_used_again_while_a_request_of_an_earlier_adapter_runs(policy, serve, adapters):
    requests = [asked(number, each) for number, each in enumerate(adapters)]
    requests[0] = replace(requests[0], max_tokens=80)
    alone = [record_of(serve(policy, each)[0]) for each in reversed(requests)][::-1]

    async def main():
        longest = asyncio.create_task(policy.engine.submit(requests[0]))
        others = [await policy.engine.submit(each) for each in requests[1:]]
        return [await longest, *others]

    assert [record_of(each) for each in run(main)] == alone
    places = policy.engine._runner._adapters._places
    assert len(places) == LEAST_PLACES < len(adapters) and adapters[0].number in places


def test_an_adapter_that_is_not_finite_fails_its_own_requests_alone(policy, serve, adapters):
    lora = SPECS["second"]
    params = draw_adapter(policy, 0, lora)
    params["layers"]["mlp"]["down_proj"]["lora_b"][0, 0, 0] = np.inf
    lost = asyncio.run(policy.add_adapter(lora, params))
    requests = [asked(3, each) for each in (None, adapters[0], adapters[1])]
    alone = [record_of(serve(policy, each)[0]) for each in requests]

    async def main():
        submitted = map(policy.engine.submit, [asked(4, lost), *requests])
        return await asyncio.gather(*submitted, return_exceptions=True)

    failed, *others = run(main)
    assert isinstance(failed, NonFiniteError) and [*map(record_of, others)] == alone


def test_a_stack_has_room_for_the_adapters_of_one_program(adapters):
    stack, tables = AdapterStack(), own_tables(8, 2)
    assert stack.beside(tables, [None, None], 8) is tables
    given = [adapters[1], None, *adapters[2:], adapters[1]]
    found = stack.beside(tables, given, 8)
    assert found.places.tolist() == [*found.places[:1], -1, *found.places[2:6], found.places[0], -1]
    for place, adapter in zip(found.places, given, strict=False):
        for path, leaf in {} if adapter is None else adapter.layers[1].items():
            stacked = np.asarray(found.layers[1][path])[place]
            np.testing.assert_array_equal(stacked[: len(leaf)], leaf)
            assert len(found.layers[1][path]) == 2 * LEAST_PLACES and not stacked[len(leaf) :].any()


def test_adapters_need_a_decoder_without_any_on_one_device(policy, make_policy, make_scripted_policy):
    with pytest.raises(ValueError, match="a decoder without adapters, on one device"):
        asyncio.run(make_scripted_policy([0, 1]).add_adapter(SPECS["first"], {}))
    config = replace(policy.model.config, pattern=(LayerKind(has_experts=True),), num_experts=4, num_experts_per_tok=2)
    mixture = make_policy(model=decoder(config), params={"embed": jax.device_put(np.zeros((262, 32), np.float32))})
    with pytest.raises(ValueError, match=r"'down_proj'\); beside a model with experts wanted self_attn/\*"):
        mixture.check_adapter(SPECS["first"])
    assert mixture.check_adapter(LoraSpec(4, 8.0, ("self_attn/*",))) == config


@pytest.mark.slow  # programs of many slots and few pages, and of masked and filtered rows
def test_no_neighbour_and_no_eviction_changes_a_bit(make_policy, make_adapters, serve):
    """Few-row programs, preemption, penalties, most likely tokens, and a stack that grows."""
    policy = make_policy(slots=32, cache_tokens=64 * 40)
    adapters = [None, *make_adapters(policy, *SPECS.values(), *SPECS.values(), *SPECS.values())]
    changes = [{}, {"frequency_penalty": 0.5}, {"top_logprobs": 2}]
    requests = [
        replace(each, max_tokens=3 * each.max_tokens + 8, adapter=adapters[number % 7], **changes[number % 3])
        for number, each in enumerate(varied_requests(42))
    ]
    alone = [record_of(serve(policy, each)[0]) for each in requests]
    assert [record_of(each) for each in serve(policy, *requests)] == alone

import asyncio
import json
import math
import re
from functools import partial

import jax
import numpy as np
import pytest

from jaxft.core.objectives import score_batch
from jaxft.errors import RequestError
from jaxft.rollout.calls import decode_support, logprobs_with_record, recorded_call
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.grammar import call_grammar
from jaxft.rollout.recorder import Episode
from jaxft.rollout.sequences import TokenSequence, token_sequences
from jaxft.training.batch import BatchPlanner, Row, make_batch, score_tokens

QUESTION = [{"role": "user", "content": "x?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}


@pytest.fixture
def client(policy):
    return ChatClient(policy, "player")


def ask(client, *requests):
    """Replies to requests that are answered at once."""

    async def main():
        async with asyncio.timeout(120):
            return await asyncio.gather(*(client.answer(request) for request in requests))

    return asyncio.run(main())


def request(**options):
    return ChatRequest(messages=QUESTION, **({"seed": 3, "max_tokens": 60} | options))


def ids_in(support):
    """Ids of a recorded support."""
    return np.flatnonzero(np.unpackbits(decode_support(support).view(np.uint8), bitorder="little"))


def test_answers_match_their_grammars_and_others_keep_every_bit(client):
    free = [request(seed=seed, max_tokens=20) for seed in range(3)]
    alone = ask(client, *free)
    grammars = [
        request(response_format=FORMAT),
        request(guided_regex="[0-9]{3}-(a|b)"),
        request(guided_grammar='start: "yes" | "no"', temperature=0.0),
        request(guided_regex="[ab]{4}", top_k=1),
    ]
    *with_grammar, one, two, three = ask(client, *grammars, *free)
    assert [one.completion, two.completion, three.completion] == [reply.completion for reply in alone]
    assert set(json.loads(with_grammar[0].content)) == {"a", "b"}
    assert re.fullmatch("[0-9]{3}-(a|b)", with_grammar[1].content)
    assert with_grammar[2].content in ("yes", "no") and re.fullmatch("[ab]{4}", with_grammar[3].content)
    assert [reply.finish_reason for reply in with_grammar] == ["stop"] * 4
    again = ask(client, *grammars[::-1])[::-1]  # other neighbours and slots
    assert [reply.completion for reply in again] == [reply.completion for reply in with_grammar]


def test_the_record_says_what_each_token_was_drawn_from(client, policy):
    episode = Episode(run_seed=0, stream=0, rollout_index=0, example_id="a", generation=0)
    with recording(episode):
        ask(client, request(guided_regex="[ab]{3}", temperature=0.7))
    (sequence,) = token_sequences(episode.calls)
    completion = episode.calls[0].reply.completion
    texts = policy.template.tokens
    for support, token, *logprobs in zip(
        completion.supports,
        completion.token_ids,
        completion.sampler_logprobs,
        completion.behavior_logprobs,
        strict=True,
    ):
        ids = ids_in(support).tolist()
        assert token in ids and logprobs[0] < logprobs[1]
        assert {texts.decoded_text(each) for each in ids} in ({"a", "b"}, {"<|end|>"})
    assert completion.behavior_logprobs[-1] == pytest.approx(0.0, abs=1e-6)  # nothing else could follow
    written = sequence.model_dump_json()
    assert TokenSequence.model_validate_json(written).model_dump() == sequence.model_dump()
    assert written.count(completion.supports[0]) == 1
    assert sequence.supports[-4:] == completion.supports and not any(sequence.supports[:-4])
    record = json.loads(json.dumps(logprobs_with_record(episode.calls[0], texts.decoded_text)))
    assert recorded_call(record).reply.completion == completion


def test_filters_record_their_supports_and_free_answers_none(client, policy):
    free, filtered, forbidden, shifted = ask(
        client,
        request(max_tokens=4),
        request(max_tokens=4, top_k=5),
        request(max_tokens=4, logit_bias={65: -math.inf}),
        request(max_tokens=4, logit_bias={65: 1.0}, top_k=5),
    )
    assert free.completion.supports == shifted.completion.supports == []
    assert [len(ids_in(each)) for each in filtered.completion.supports] == [5] * 4
    assert ids_in(forbidden.completion.supports[0]).tolist() == [*range(65), *range(66, 262)]


@pytest.mark.parametrize(
    "options", [{"response_format": FORMAT}, {"top_p": 0.8, "min_p": 0.01}], ids=["grammar", "filters"]
)
def test_the_trainer_recomputes_what_a_token_was_drawn_with(client, policy, options):
    """The numerator of the ratio, over the recorded supports, is its recorded denominator."""
    episode = Episode(run_seed=0, stream=0, rollout_index=0, example_id="a", generation=0)
    with recording(episode):
        ask(client, request(temperature=0.8, max_tokens=24, **options))
    (row,) = token_sequences(episode.calls)
    job = make_batch([Row(row, 0)], BatchPlanner(256), has_supports=True)
    params = asyncio.run(policy.read(lambda params: params))
    scores = score_tokens(job, partial(jax.jit(partial(score_batch, policy.model)), params))
    mask = np.array(row.completion_mask)
    recomputed = scores.logprobs[job.tokens][mask]
    np.testing.assert_allclose(recomputed, np.array(row.behavior_logprobs)[mask], atol=1e-5)
    assert np.abs(recomputed - np.array(row.sampler_logprobs)[mask]).max() > 0.01
    np.testing.assert_array_equal(job.batch.sampler_logprobs[job.tokens][mask], np.float32(row.behavior_logprobs)[mask])


def test_an_answer_ends_late_or_never(client, policy):
    end = policy.template.stop_ids[0]
    ending = {end: 20.0}  # so that it would end at once
    late, never, free = ask(
        client,
        request(min_tokens=3, stop_token_ids=[66], max_tokens=9, top_k=50),
        request(ignore_eos=True, logit_bias=ending, max_tokens=5),
        request(logit_bias=ending, max_tokens=5),
    )
    assert len(free.token_ids) == 1 and never.token_ids == (end,) * 5
    assert not {end, 66} & set(late.token_ids[:3])
    assert len(late.completion.supports) == len(late.token_ids)
    assert all(not {end, 66} & set(ids_in(support)) for support in late.completion.supports[:3])
    (short,) = ask(client, request(min_tokens=4, max_tokens=4))
    assert len(short.token_ids) == 4 and len(ids_in(short.completion.supports[0])) == 261  # all but the end


PENALIZED = [
    {"repetition_penalty": 50.0, "temperature": 0.8},
    {"presence_penalty": -1.5, "frequency_penalty": -0.7, "top_p": 0.8},
    {"frequency_penalty": 2.0, "repetition_penalty": 0.8, "guided_regex": "[ab]{12}"},
]


def test_penalized_tokens_are_drawn_and_recorded_as_numpy_has_them(client, policy):
    """Log-probabilities with penalties, those without over the same tokens, and what the trainer makes of both."""
    penalized, free = [request(max_tokens=12, **options) for options in PENALIZED], request(max_tokens=12)
    (alone,), (*_, beside) = ask(client, free), ask(client, *penalized, free)
    assert beside.completion == alone.completion and not alone.completion.supports
    episode = Episode(run_seed=0, stream=0, rollout_index=0, example_id="a", generation=0)
    with recording(episode):
        ask(client, *penalized)
    params, model = asyncio.run(policy.read(lambda params: params)), policy.model
    compute = jax.jit(lambda params, *given: model.unembed(params, model.apply(params, *given)[0]))
    for options, call in zip(PENALIZED, sorted(episode.calls, key=lambda call: call.index), strict=True):
        prompt, completion = len(call.prompt_ids), call.reply.completion
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(call.context_ids)] = call.context_ids
        logits = np.asarray(compute(params, ids, np.arange(64, dtype=np.int32)[None]), np.float64)[0]
        for index, (token, text) in enumerate(zip(completion.token_ids, completion.supports, strict=True)):
            assert text.startswith("~")
            z = logits[prompt + index - 1]
            seen = list({*call.context_ids[: prompt + index]})
            counts = np.bincount(completion.token_ids[:index], minlength=len(z))
            repetition, lower = options.get("repetition_penalty", 1.0), z.copy()
            lower[seen] = np.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
            lower -= options.get("frequency_penalty", 0) * counts + options.get("presence_penalty", 0) * (counts > 0)
            support = ids_in(text[1:]) if text[1:] else np.arange(len(z))
            for recorded, scores in ((completion.sampler_logprobs, z), (completion.behavior_logprobs, lower)):
                scores = scores / options.get("temperature", 1.0)
                assert recorded[index] == pytest.approx(scores[token] - np.log(np.exp(scores[support]).sum()), abs=1e-4)
        (row,) = token_sequences([call])
        assert TokenSequence.model_validate_json(row.model_dump_json()).model_dump() == row.model_dump()
        job = make_batch([Row(row, 0)], BatchPlanner(256), has_supports=True)
        assert (job.supports is None) == (options is PENALIZED[0])
        scores = score_tokens(job, partial(jax.jit(partial(score_batch, model)), params))
        mask = np.array(row.completion_mask)
        drawn, own = job.batch.behavior_logprobs[job.tokens][mask], job.batch.sampler_logprobs[job.tokens][mask]
        np.testing.assert_allclose(scores.logprobs[job.tokens][mask], own, atol=1e-5)  # as without penalties
        np.testing.assert_array_equal(drawn, np.float32(completion.behavior_logprobs))
        assert np.abs(drawn - own).max() > 0.01


def test_a_greedy_answer_with_a_large_penalty_repeats_no_token(client):
    (reply,) = ask(client, request(temperature=0.0, repetition_penalty=1e6, max_tokens=20, ignore_eos=True))
    said = [*reply.prompt_ids, *reply.token_ids]
    assert len(set(said[len(reply.prompt_ids) :])) == 20


def test_strict_functions_get_arguments_of_their_schema(client):
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ]
    named = {"type": "function", "function": {"name": "f"}}
    one, other = ask(
        client, request(tools=tools, tool_choice=named), request(tools=tools[:1], tool_choice="required", seed=4)
    )
    for reply in (one, other):
        (call,) = reply.tool_calls
        assert call.name == "f" and set(json.loads(call.arguments)) == {"a", "b"}
    grammar = call_grammar(tools, has_name=False, behind=">", end="</call>").text
    assert grammar.startswith("start: call0 | call1") and '"g>"' in grammar


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "not"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "schema is false"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}}, "Unsatisfiable"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "more than one"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(client, options, named):
    with pytest.raises(RequestError, match=re.escape(named)):
        ask(client, request(**options))

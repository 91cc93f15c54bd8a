import asyncio
import copy
import random
import threading

import jax
import numpy as np
import pytest

import jaxft
from jaxft.errors import PromptTooLongError, RequestError
from jaxft.models.bridge import from_function
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import outside_calls, recording
from jaxft.rollout.decode_batch import most_likely
from jaxft.rollout.recorder import Episode
from jaxft.rollout.sequences import token_sequences
from jaxft.rollout.streaming import StopFinder, TextDecoder, find_stop

QUESTION = [{"role": "user", "content": "x?"}]


def chat(client, messages=QUESTION, *, episode=None, times=1, **options):
    """Replies to the same question, asked one after the other."""

    async def ask():
        return [await client.chat(messages, **options) for _ in range(times)]

    async def main():
        async with asyncio.timeout(60):
            if episode is None:
                return await ask()
            with recording(episode):
                return await ask()

    return asyncio.run(main())


def make_episode(**changes):
    return Episode(**({"run_seed": 0, "stream": 0, "rollout_index": 0, "example_id": "a", "generation": 0} | changes))


@pytest.fixture
def client(policy):
    return ChatClient(policy, "player")


def test_a_reply_says_what_was_sampled_and_how(client, policy):
    (reply,) = chat(client, max_tokens=6)
    assert reply.content == policy.template.answer_text(reply.token_ids)
    assert len(reply.token_ids) == len(reply.logprobs) == 6
    assert all(logprob < 0 for logprob in reply.logprobs)
    assert (reply.finish_reason, reply.policy_version) == ("length", 0)


def test_calls_outside_an_episode_differ_and_are_recorded_nowhere(client):
    first, second = chat(client, times=2, max_tokens=8)
    assert first.token_ids != second.token_ids


def test_calls_inside_an_episode_are_recorded_and_repeatable(client):
    episode, repeated, other = make_episode(), make_episode(), make_episode(generation=1)
    replies = chat(client, episode=episode, times=2, max_tokens=8, temperature=0.9)
    assert replies[0].token_ids != replies[1].token_ids  # the same prompt, asked again
    assert chat(client, episode=repeated, times=2, max_tokens=8, temperature=0.9) == replies
    assert chat(client, episode=other, times=1, max_tokens=8, temperature=0.9)[0] != replies[0]
    call = episode.calls[1]
    assert (call.index, call.llm, call.temperature, call.reply.policy_version) == (1, "player", 0.9, 0)
    assert (call.token_ids, call.content, call.reply.finish_reason) == (
        replies[1].token_ids,
        replies[1].content,
        replies[1].finish_reason,
    )
    assert call.messages == tuple(QUESTION) and call.sampler_logprobs == replies[1].logprobs


def test_the_episode_may_set_the_temperature(client):
    episode = make_episode(temperature=0.0)
    first, second = chat(client, episode=episode, times=2, max_tokens=8, temperature=1.3)
    assert first.token_ids == second.token_ids
    assert [call.temperature for call in episode.calls] == [0.0, 0.0]


def test_without_a_budget_an_answer_may_fill_the_context(client, policy):
    (reply,) = chat(client)
    room = policy.engine.max_context_tokens - len(policy.template.prompt(QUESTION).ids)
    assert len(reply.token_ids) == room if reply.finish_reason == "length" else len(reply.token_ids) <= room


def test_a_stop_string_ends_the_answer(client):
    def ask(**options):
        return chat(client, episode=make_episode(), max_tokens=12, **options)[0]

    free = ask()
    readable = [character for character in free.content if character.isprintable() and character != "\ufffd"]
    stop = readable[len(readable) // 2]
    stopped = ask(stop=stop)
    assert stopped.content == free.content[: free.content.index(stop)]
    assert stopped.finish_reason == "stop"
    assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids  # the stop string stays in the ids
    assert free.logprobs[: len(stopped.token_ids)] == stopped.logprobs
    assert ask(stop=["\x00never", stop]) == stopped
    assert ask(stop=()) == ask(stop=["\x00never"]) == free


def converse(client, episode, messages, stop, *, include_stop=False, put_back=""):
    """Two turns: an answer that `stop` ends, put into the history with `put_back` after it, and a short one."""

    async def main():
        with recording(episode):
            first = await client.chat(messages, max_tokens=40, stop=stop, include_stop=include_stop)
            said = {"role": "assistant", "content": first.content + put_back}
            await client.chat([*messages, said, {"role": "user", "content": "y"}], max_tokens=1)
            return first

    return asyncio.run(main())


def readable_characters(text):
    """The printable ASCII characters after the first byte of the text that could not be decoded."""
    return [character for character in text[text.index("\ufffd") :] if character.isprintable() and character.isascii()]


def test_a_stop_string_that_is_included_stays_in_one_sequence_with_its_history(client):
    (free,) = chat(client, episode=make_episode(), max_tokens=40)
    stop = readable_characters(free.content)[0]
    included, cut = make_episode(), make_episode()
    first = converse(client, included, QUESTION, stop, include_stop=True)
    assert first.content == free.content[: free.content.index(stop) + 1] and first.finish_reason == "stop"
    assert len(token_sequences(included.calls)) == 1
    # The same history, but of another text than the recorded answer: it is tokenised afresh.
    assert converse(client, cut, QUESTION, stop, put_back=stop).token_ids == first.token_ids
    assert cut.calls[1].messages == included.calls[1].messages and len(token_sequences(cut.calls)) == 2


LONG = [{"role": "user", "content": "abc" * 40}]


@pytest.mark.parametrize(("max_tokens", "fed"), [(5, 91), (90, 48), (None, 48)])
def test_a_truncated_prompt_is_recorded_as_it_was_fed(policy, max_tokens, fed):
    client, episode = ChatClient(policy, "player", "truncate_left"), make_episode()
    whole = policy.template.prompt(LONG).ids
    (reply,) = chat(client, LONG, episode=episode, max_tokens=max_tokens)
    (call,) = episode.calls
    assert call.prompt_ids == whole[-fed:] and call.prompt.truncated_tokens == len(whole) - fed
    assert len(reply.token_ids) <= (max_tokens or 48) and call.context_ids == (*whole[-fed:], *reply.token_ids)
    # The same ids, asked for by themselves, give the same tokens: nothing that was cut is remembered.
    (repeated,) = chat(client, LONG, episode=make_episode(), max_tokens=max_tokens)
    assert repeated == reply


def test_a_next_turn_goes_on_from_a_truncated_prompt(policy):
    client, episode = ChatClient(policy, "player", "truncate_left"), make_episode()
    (free,) = chat(client, LONG, episode=make_episode(), max_tokens=40)
    stop = next(character for character in free.content if character.isprintable() and character.isascii())
    converse(client, episode, LONG, stop, include_stop=True)
    first, second = episode.calls
    assert second.prompt_ids[: len(first.context_ids)] == first.context_ids
    assert second.prompt.truncated_tokens == first.prompt.truncated_tokens == 123 - 56  # the same beginning is missing
    (sequence,) = token_sequences(episode.calls)
    assert tuple(sequence.tokens) == second.context_ids and sequence.completion_mask.index(True) == 56


def test_text_cut_before_it_is_tokenised_is_counted(policy):
    client, episode = ChatClient(policy, "player", "truncate_left"), make_episode()
    chat(client, [{"role": "user", "content": "x " * 600_000}], episode=episode, max_tokens=5)
    (call,) = episode.calls
    assert policy.template.tokenizer.decode(call.prompt_ids) == " x" * 44 + " <|end|><|assistant|>"
    assert call.prompt.truncated_tokens + len(call.prompt_ids) == pytest.approx(1_200_003, rel=1e-4)


def test_prompts_that_fit_are_never_cut(policy):
    for long_prompts in ("drop", "truncate_left"):
        episode = make_episode()
        chat(ChatClient(policy, "player", long_prompts), episode=episode, max_tokens=90)
        assert episode.calls[0].prompt.truncated_tokens == 0 and not episode.is_dropped


def test_a_long_prompt_marks_an_episode_that_is_to_be_dropped(policy):
    for long_prompts, is_dropped in (("fail", False), ("drop", True)):
        episode = make_episode()
        with pytest.raises(PromptTooLongError, match="123 tokens"):
            chat(ChatClient(policy, "player", long_prompts), LONG, episode=episode)
        assert episode.is_dropped == is_dropped
    with pytest.raises(PromptTooLongError, match="123 tokens"):
        chat(ChatClient(policy, "player", "drop"), LONG)  # outside an episode there is nothing to drop


def test_another_models_calls_are_not_continued(policy):
    episode, (one, other) = make_episode(), (ChatClient(policy, name) for name in ("one", "other"))
    (reply,) = chat(one, episode=episode, max_tokens=3)
    longer = [*QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "y?"}]
    chat(other, longer, episode=episode, max_tokens=3)
    chat(one, longer, episode=episode, max_tokens=3)
    first, apart, second = episode.calls
    assert second.prompt_ids[: len(first.context_ids)] == first.context_ids
    assert apart.prompt_ids == policy.template.prompt(longer).ids


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]


FORCED = {"type": "function", "function": {"name": "look_up"}}


def write_script(tokenizer, *parts):
    """A script of 256 positions: parts of text, the last of which goes on until the end."""
    ids = [token for part in parts for token in tokenizer.encode(part)]
    return (ids + [ids[-1]] * 256)[:256]


def test_tools_are_called_and_turns_are_one_sequence(make_scripted_policy, tokenizer):
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    called = 'Well. <call:look_up>{"city":"Oslo"}</call><|end|>'
    script = write_script(tokenizer, asked, called, "<|tool|>3<|end|><|assistant|>", "3 <call:look_up>{<|end|>")
    llm = ChatClient(make_scripted_policy(script))
    episode = make_episode()

    async def main():
        with recording(episode):
            first = await llm.chat(QUESTION, tools=TOOLS)
            (call,) = first.tool_calls
            assert (call.name, call.arguments) == ("look_up", '{"city": "Oslo"}')
            assert (first.content, first.finish_reason) == ("Well.", "tool_calls")
            assert tokenizer.decode(first.prompt_ids) == asked and tokenizer.decode(first.token_ids) == called
            history = [*QUESTION, first.message, {"role": "tool", "content": "3", "tool_call_id": call.id}]
            return await llm.chat(history, tools=TOOLS)

    second = asyncio.run(main())
    assert (second.content, second.finish_reason, second.tool_calls) == ("3 <call:look_up>{", "stop", ())
    assert [call.reply.has_malformed_tool_call for call in episode.calls] == [False, True]
    (sequence,) = token_sequences(episode.calls)
    assert tokenizer.decode(sequence.tokens) == asked + called + "<|tool|>3<|end|><|assistant|>3 <call:look_up>{<|end|>"


def test_a_choice_decides_on_tools(make_scripted_policy, tokenizer):
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    free = ChatClient(make_scripted_policy(write_script(tokenizer, asked, "<call:look_up>{}</call>" * 2 + "<|end|>")))

    def ask(**options):
        return asyncio.run(free.chat(QUESTION, tools=TOOLS, **options))

    assert ask(tool_choice="none").content == "<call:look_up>{}</call>" * 2
    assert len(ask().tool_calls) == 2 and len({call.id for call in ask().tool_calls}) == 2
    assert len(ask(parallel_tool_calls=False).tool_calls) == 1
    assert [(call.name, call.arguments) for call in ask(stop=["</call>"]).tool_calls] == [("look_up", "{}")]
    for choice in ("required", FORCED):
        forced = ask(tool_choice=choice)  # the script goes on behind the forced beginning
        begun = tokenizer.decode(forced.prompt_ids).removeprefix(asked)
        assert begun == ("<call:" if choice == "required" else "<call:look_up>")
        assert [call.name for call in forced.tool_calls] == ["look_up"] * 2
    cut = ask(max_tokens=10)
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())


OPENS_THOUGHT = (
    "{#- </think> <tool_call> -#}{%- for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}"
    "{%- endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
)


def test_a_forced_call_ends_the_reasoning_that_the_prompt_has_begun(make_scripted_policy, tokenizer):
    own = copy.copy(tokenizer)
    own.chat_template = OPENS_THOUGHT
    asked = "<|im_start|>user\nx?<|im_start|>assistant\n<think>\n"
    begun = asked + '\n</think>\n\n<tool_call>\n{"name": "look_up", "arguments": '
    called = "{}}\n</tool_call>"
    policy = make_scripted_policy(write_script(tokenizer, begun, called + "more<|end|>"))
    policy.template = ChatTemplate(own, policy.template.stop_ids)
    request = ChatRequest(QUESTION, tools=TOOLS, tool_choice=FORCED, stop="</tool_call>")
    *deltas, reply = stream(ChatClient(policy), request, episode=make_episode())
    assert (policy.template.text(reply.prompt_ids), policy.template.text(reply.token_ids)) == (begun, called)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("look_up", "{}")]
    assert not any(delta.content or delta.reasoning_content for delta in deltas) and reply.reasoning_content is None


def test_several_answers_have_random_numbers_of_their_own(client):
    episode, repeated = make_episode(), make_episode()
    (reply,) = chat(client, episode=episode, max_tokens=6, n=3)
    assert len({choice.token_ids for choice in reply.choices}) == 3
    assert [choice.call_index for choice in reply.choices] == [0, 1, 2] == [call.index for call in episode.calls]
    separate = chat(client, episode=repeated, times=3, max_tokens=6)
    assert [each.token_ids for each in separate] == [choice.token_ids for choice in reply.choices]


def test_a_seed_picks_the_random_numbers(client):
    def ids(episode=None, **options):
        return chat(client, episode=episode, max_tokens=8, **options)[0].token_ids

    assert ids(seed=1) == ids(seed=1) != ids(seed=2)
    inside = ids(make_episode(), seed=1)
    assert inside == ids(make_episode(), seed=1) != ids(make_episode(), seed=2)
    assert inside not in (ids(make_episode()), ids(make_episode(generation=1), seed=1))


def test_tool_calls_of_seeded_chats_have_ids_of_their_own(make_scripted_policy, tokenizer):
    asked = "<|system|>tools: look_up(city)<|end|><|user|>x?<|end|><|assistant|>"
    llm = ChatClient(make_scripted_policy(write_script(tokenizer, asked, "<call:look_up>{}</call><|end|>")))

    def call_id(question, seed=7):
        (call,) = asyncio.run(llm.chat([{"role": "user", "content": question}], tools=TOOLS, seed=seed)).tool_calls
        return call.id

    assert call_id("x?") == call_id("x?") and len({call_id("x?"), call_id("y?"), call_id("x?", 8)}) == 3


def test_answers_that_the_agent_never_got_are_not_recorded(client, policy):
    episode = make_episode()
    submit, begun = policy.engine.submit, []

    async def fail_second(request, on_tokens=None):
        begun.append(request)
        if len(begun) == 2:
            raise RuntimeError("no")
        return await submit(request, on_tokens)

    policy.engine.submit = fail_second
    try:
        with pytest.raises(RuntimeError, match="no"):
            chat(client, episode=episode, max_tokens=4, n=3)
    finally:
        policy.engine.submit = submit
    assert len(begun) >= 2 and episode.calls == []


def test_answers_to_one_request_have_one_version(make_policy):
    policy = make_policy()
    llm, episode = ChatClient(policy), make_episode()

    async def main():
        with recording(episode):
            asking = asyncio.create_task(llm.chat(QUESTION, n=20, max_tokens=24))  # more than slots
            while policy.engine.counts.decoded_tokens == 0:
                await asyncio.sleep(0.001)
            await policy.update(lambda params: ({**params}, None))
            return await asking

    reply = asyncio.run(main())
    versions = {choice.policy_version for choice in reply.choices}
    assert versions == {1} == {call.reply.policy_version for call in episode.calls} and len(episode.calls) == 20


def test_a_step_reward_names_one_of_several_answers(client):
    episode = make_episode()
    (reply,) = chat(client, episode=episode, max_tokens=4, n=3)
    with pytest.raises(RuntimeError, match="3 answers"):
        episode.reward_step(1.0)
    episode.reward_step(1.0, reply.choices[1])
    episode.reward_step(0.5, reply.choices[1])
    assert episode.shaped_rewards == [0.0, 1.5, 0.0]
    with pytest.raises(ValueError):
        episode.reward_step(1.0, chat(client, max_tokens=1)[0])


def test_most_likely_tokens_of_a_small_vocabulary(tokenizer):
    assert len(most_likely_row(vocabulary=3)) == 3


def most_likely_row(vocabulary):
    """The most likely tokens at the last position of a row, by a network that prefers low ids."""
    model, params = from_function(falling), {"logits": -np.arange(vocabulary, dtype=np.float32)}
    found = most_likely(model, params, np.zeros((1, 64), np.int32), 3, 1.0, vocabulary)
    values, ids = (np.asarray(each)[2] for each in found)
    assert ids.tolist() == sorted(ids.tolist()) and np.exp(values).sum() == pytest.approx(1.0)
    return ids


def falling(params, tokens, positions):
    return jax.numpy.broadcast_to(params["logits"], (*tokens.shape, *params["logits"].shape))


def test_more_token_ids_may_end_the_answer(client, tokenizer):
    free = chat(client, episode=make_episode(), max_tokens=8)[0]
    stop = free.token_ids[3]
    stopped = chat(client, episode=make_episode(), max_tokens=8, stop_token_ids=[stop])[0]
    end = free.token_ids.index(stop) + 1
    assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == "stop"
    assert stopped.content == client.policy.template.answer_text(free.token_ids[: end - 1])


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_an_end_token_that_the_request_names_ends_the_answer_in_spite_of_ignore_eos(
    make_scripted_policy, tokenizer, field
):
    end = tokenizer.eos_token if field == "stop" else tokenizer.eos_token_id
    asked = "<|user|>x?<|end|><|assistant|>"
    llm = ChatClient(make_scripted_policy(write_script(tokenizer, asked, "yes<|end|>no<|end|>")))
    free = asyncio.run(llm.chat(QUESTION, max_tokens=8, ignore_eos=True))
    assert (free.content, free.finish_reason) == ("yesno", "length")
    ended = asyncio.run(llm.chat(QUESTION, max_tokens=8, ignore_eos=True, **{field: [end]}))
    assert (ended.content, ended.finish_reason, ended.stop_reason) == ("yes", "stop", end)
    assert ended.token_ids == free.token_ids[:4]


THINKING = {
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"content_args": {"strip": False}}, "reasoning_content": {"open": "<t>", "close": "</t>"}},
}


@pytest.mark.parametrize(
    ("answer", "stop", "content", "reasoning", "tokens"),
    [
        ("yes\n\nNext", "\n\n", "yes", None, 5),
        ("yes### Next", "###", "yes", None, 6),
        ("abc<|user|>def", "<|user|>", "abc", None, 4),
        ("<t>a\n\nb</t>\n\nc\n\nd", "\n\n", "c", "a\n\nb", 16),
        ("<t>a\n\nb</t>c<|tool|>d", "<|tool|>", "c", "a\n\nb", 13),
    ],
)
def test_where_a_stop_string_ends_an_answer(make_scripted_policy, tokenizer, answer, stop, content, reasoning, tokens):
    policy = make_scripted_policy(write_script(tokenizer, "<|user|>x?<|end|><|assistant|>", answer + "<|end|>"))
    own = copy.copy(tokenizer)
    own.response_template = THINKING
    policy.template = ChatTemplate(own, policy.template.stop_ids)
    *deltas, reply = stream(ChatClient(policy), ChatRequest(QUESTION, stop=stop), episode=make_episode())
    assert (reply.content, reply.reasoning_content, reply.stop_reason) == (content, reasoning, stop)
    assert reply.finish_reason == "stop" and len(reply.token_ids) == tokens
    assert "".join(delta.content for delta in deltas) == content
    assert "".join(delta.reasoning_content for delta in deltas) == (reasoning or "")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_most_likely_tokens_agree_with_scores_of_the_trainer(client, score, temperature):
    reply = chat(client, episode=make_episode(), max_tokens=5, top_logprobs=4, temperature=temperature)[0]
    plain = chat(client, episode=make_episode(), max_tokens=5, temperature=temperature)[0]
    assert reply.token_ids == plain.token_ids and reply.logprobs == plain.logprobs
    assert [len(top) for top in reply.top_logprobs] == [4] * 5

    # Each likely token in place of the last sampled one, by another program.
    rows = [[*reply.prompt_ids, *reply.token_ids[:-1], token] for token, _ in reply.top_logprobs[-1]]
    expected = score(rows, [[temperature] * len(rows[0])] * 4)[:, len(rows[0]) - 1].tolist()
    assert [value for _, value in reply.top_logprobs[-1]] == pytest.approx(expected, abs=1e-5)
    assert expected == sorted(expected, reverse=True)
    known = dict(reply.top_logprobs[-1])
    if temperature == 0.0:
        assert next(iter(known)) == reply.token_ids[-1]


def stream(client, request, *, episode):
    async def main():
        with recording(episode):
            return [piece async for piece in client.stream(request)]

    return asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": ["e", "\x00"]}, {"top_logprobs": 2}, {"tools": TOOLS}])
def test_a_stream_gives_the_reply_in_pieces(client, options):
    (reply,) = chat(client, episode=make_episode(), max_tokens=20, **options)
    episode = make_episode()
    *deltas, last = stream(client, ChatRequest(QUESTION, max_tokens=20, **options), episode=episode)
    assert last == reply and len(episode.calls) == len(reply.choices)
    for index, choice in enumerate(reply.choices):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.content for delta in own) == choice.content
        assert tuple(token for delta in own for token in delta.token_ids) == choice.token_ids
        assert tuple(logprob for delta in own for logprob in delta.logprobs) == choice.logprobs
        assert len(own) >= (1 if "top_logprobs" in options else len(choice.token_ids) // 8)
        assert options or any(delta.content for delta in own[:-1])  # text does not wait for the end


def test_a_stream_that_is_left_frees_its_slots(client, policy):
    episode = make_episode()

    async def main():
        with recording(episode):
            for _ in range(3):
                pieces = client.stream(ChatRequest(QUESTION, n=4))
                async for _ in pieces:
                    break
                await pieces.aclose()
            await client.chat(QUESTION, max_tokens=1)

    asyncio.run(main())
    assert len(episode.calls) == 1 and not policy.engine._scheduler.running


def test_a_request_refuses_impossible_fields_by_name():
    impossible = {
        "temperature": (-1.0, float("nan")),
        "top_p": (0.0, 1.5),
        "top_k": (-1,),
        "min_p": (1.0,),
        "max_tokens": (0,),
        "n": (0, 129),
        "seed": (2**63,),
        "stop": ([""], ["\ud800"], ""),
        "stop_token_ids": ([-1], [2**40]),
        "top_logprobs": (-1, 21),
        "logit_bias": ({-1: 1.0},),
        "tool_choice": ("always", "required", {"type": "function", "function": {"name": "f"}}),
        "chat_template_kwargs": ({"a": object()},),
    }
    for field, values in impossible.items():
        for value in values:
            with pytest.raises(RequestError) as refused:
                ChatRequest(QUESTION, **{field: value})
            assert refused.value.param == field


def test_variables_of_the_template_reach_it_and_nothing_else(client):
    chat(client, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    for name in ("chat_template", "tools", "tokenize", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name) as refused:
            chat(client, max_tokens=1, chat_template_kwargs={name: "x"})
        assert refused.value.param == "chat_template_kwargs"


def test_two_names_of_a_limit_must_agree(client):
    assert len(chat(client, max_completion_tokens=3)[0].token_ids) <= 3
    with pytest.raises(RequestError, match="max_completion_tokens 4"):
        chat(client, max_tokens=3, max_completion_tokens=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"messages": [{"role": "user", "content": "\ud800"}]}, ValueError, r"messages\[0\]\['content'\] .* U\+D800"),
        ({"logit_bias": {300: 1.0}}, RequestError, r"logit_bias\[0\] is 300; .* 262 tokens"),
        ({"logit_bias": {7: 1e300}}, RequestError, r"logit_bias .*1e\+300 .*token 7"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, RequestError, "103 tokens"),
        (
            {"messages": [{"role": "user", "content": "x " * 2_500_000}]},
            PromptTooLongError,
            r"500\d{4} bytes.* 1048576 .* is 96 .*long_prompts",
        ),
    ],
)
def test_impossible_chats_are_refused(client, options, error, message):
    with pytest.raises(error, match=message):
        chat(client, **options)


def test_chat_sync_makes_the_same_call_as_chat(client):
    """Both in a thread that an episode's event loop waits for and in a program without an event loop."""
    options = {"max_tokens": 8, "temperature": 0.9}
    (awaited,) = chat(client, episode=make_episode(), **options)
    episode = make_episode()

    async def main():
        async with asyncio.timeout(60):
            with recording(episode):
                return await asyncio.to_thread(client.chat_sync, QUESTION, **options)

    assert asyncio.run(main()) == awaited and len(episode.calls) == 1
    assert len(client.chat_sync(QUESTION, max_tokens=3).token_ids) == 3


def test_chat_sync_asks_the_chat_of_a_subclass(policy):
    class Short(ChatClient):
        async def chat(self, messages):
            return await super().chat(messages, max_tokens=2)

    assert len(Short(policy, "player").chat_sync(QUESTION).token_ids) == 2


def test_chat_sync_is_refused_where_an_event_loop_runs(client):
    async def main():
        client.chat_sync(QUESTION)

    with pytest.raises(RuntimeError, match=r"await llm\.chat"):
        asyncio.run(main())


def test_an_episode_that_has_ended_gets_no_answers(client):
    episode = make_episode()

    async def main():
        with recording(episode):
            calling = asyncio.create_task(asyncio.to_thread(client.chat_sync, QUESTION))
            while not episode._waiting:
                await asyncio.sleep(0.001)
            assert episode.end()  # what waits is cancelled
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert not episode.end()
            for call in (client.chat(QUESTION), asyncio.to_thread(client.chat_sync, QUESTION)):
                with pytest.raises(asyncio.CancelledError):
                    await call

    asyncio.run(main())
    assert episode.calls == []


def test_threads_that_know_no_episode_are_counted(client):
    episode, before = make_episode(), outside_calls()

    def run_in_thread(function):
        thread = threading.Thread(target=function, args=(QUESTION,), kwargs={"max_tokens": 2})
        thread.start()
        return thread

    async def main():
        async with asyncio.timeout(60):
            with recording(episode), jaxft.named_function("search"):
                with recording(None):
                    await client.chat(QUESTION, max_tokens=2)  # as an evaluator does, on purpose
                threads = [run_in_thread(client.chat_sync), run_in_thread(jaxft.in_episode(client.chat_sync))]
                carried = jaxft.in_episode(client.chat)
            await carried(QUESTION, max_tokens=2)
            for thread in threads:
                await asyncio.to_thread(thread.join)

    asyncio.run(main())
    assert outside_calls() - before == 1
    assert [call.functions for call in episode.calls] == [("search",), ("search",)]
    with pytest.raises(RuntimeError, match="in_episode"):
        jaxft.in_episode(client.chat_sync)


class Counting:
    """A chat template that counts the tokens that it decodes."""

    def __init__(self, template):
        self.template, self.tokens = template, 0

    def answer_text(self, token_ids):
        self.tokens += len(token_ids)
        return self.template.answer_text(token_ids)


def first_of_all(template, ids, stops):
    """The same result by a search of every prefix."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(stop in template.answer_text(ids[:n]) for stop in stops)), None
    )


def by_and_by(template, ids, stops, sizes):
    finder, seen = StopFinder(template.answer_text, stops), 0
    while seen < len(ids):
        checked, seen = seen, seen + next(sizes)
        found = finder(ids[:seen], checked)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("seed", range(4))
def test_the_stop_finder_agrees_with_a_search_of_every_prefix(policy, seed):
    rng = random.Random(seed)
    template = policy.template
    eos = policy.tokenizer.eos_token_id
    # Control tokens, which have no text, stand between the characters; two of them are longer than a byte.
    pieces = [[eos] * rng.choice([0, 0, 0, 1, 30]) + policy.tokenizer.encode(rng.choice("ab.é€")) for _ in range(80)]
    ids = [token for piece in pieces for token in piece]
    text = template.answer_text(ids)
    start = rng.randrange(len(text) - 6)
    for stops in ([text[start : start + rng.randint(1, 6)]], ["ab€a.", "€é€é", "b.b.b"], ["never"]):
        sizes = iter(lambda: rng.randint(1, 9), 0)
        assert by_and_by(template, ids, stops, sizes) == first_of_all(template, ids, stops)


def test_the_work_of_the_stop_finder_grows_linearly(policy):
    template = Counting(policy.template)
    ids = policy.tokenizer.encode("a" * 4000)
    assert by_and_by(template, ids, ["\nObservation:"], iter(lambda: 8, 0)) is None
    assert template.tokens < 12 * len(ids)


@pytest.mark.parametrize("waits", [False, True])
def test_the_work_of_streaming_tokens_without_text_grows_linearly(policy, waits):
    template, (first, last) = Counting(policy.template), policy.tokenizer.encode("ab")
    decoder = TextDecoder(template.answer_text, lambda token_id: waits and token_id == first)
    ids = [first, *[policy.tokenizer.eos_token_id] * 4000, last]
    pieces = [decoder.feed(ids[start : start + 8]) for start in range(0, len(ids), 8)]
    assert pieces[0] == "a" * (not waits) and "".join(pieces) == "ab"
    assert template.tokens < len(ids)


def test_the_text_is_cut_before_the_stop_string(policy):
    ids = policy.tokenizer.encode("one. Two.")
    assert StopFinder(policy.template.answer_text, [". T", "wo"])(ids, 0) == 6
    assert StopFinder(policy.template.answer_text, ["three"])(ids, 0) is None


@pytest.mark.parametrize(
    ("stops", "expected"),
    [(["wo", "."], (3, ".")), (["wo", ". "], (3, ". ")), ([". Two", "."], (3, ".")), (["three"], None), ([], None)],
)
def test_the_first_and_shortest_stop_string_is_found(stops, expected):
    assert find_stop("one. Two.", stops) == expected

import asyncio
import concurrent.futures
import contextlib
import copy
import threading

import openai
import pytest

from jaxft.errors import PolicyError, ToolsUnsupportedError
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import outside_calls, recording
from jaxft.rollout.frameworks import framework_client
from jaxft.rollout.recorder import ENDPOINT
from jaxft.rollout.transport import async_transport, http_library
from jaxft.serving.app import make_app
from tests.serving.conftest import QUESTION, make_episode, run

pytestmark = pytest.mark.usefixtures("no_sockets")

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
NEVER_ENDS = {"logit_bias": {"1": -100}}  # the end token


def ask(client, **options):
    return client.chat.completions.create(**({"model": "player", "messages": QUESTION, "max_tokens": 8} | options))


def in_thread(work):
    """The result of a function in a new thread, which inherits no context."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result(60)


def is_idle(policy):
    """True once no slot is in use and no request waits."""

    async def main():
        async with asyncio.timeout(30):
            while policy.engine._scheduler.running or policy.engine._scheduler.waiting:
                await asyncio.sleep(0.01)
            return True

    return asyncio.run(main())


@contextlib.contextmanager
def blocking(policy):
    """Keeps the policy from answering anything until the function that it gives is called, at the latest at the end."""
    begun, release = threading.Event(), threading.Event()

    def wait(params):
        begun.set()
        release.wait(60)

    blocker = threading.Thread(target=lambda: asyncio.run(policy.read(wait)))
    blocker.start()
    assert begun.wait(30)
    yield release.set
    release.set()
    blocker.join()


@pytest.fixture
def blocked(policy):
    """Keeps the policy from answering anything."""
    with blocking(policy):
        yield
    assert is_idle(policy)


def test_a_synchronous_client_gets_what_llm_chat_gives_and_records_it(llm, sync_client):
    """Synchronous clients stream the answer; tests/serving/test_dialects.py has the asynchronous ones."""
    options = {"max_tokens": 8, "temperature": 0.9, "stop": ["\x00never"]}
    episode, whole, streamed = (make_episode() for _ in range(3))
    reply = run(llm.chat(QUESTION, **options), episode)
    with recording(whole):
        assert ask(sync_client, **options).choices[0].message.content == reply.content
    with recording(streamed):
        chunks = list(ask(sync_client, stream=True, **options))
    assert whole.calls == streamed.calls == episode.calls
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.content
    assert chunks[-1].choices[0].finish_reason == reply.finish_reason and len({chunk.id for chunk in chunks}) == 1


def test_a_reply_can_be_trained_on_from_the_client(client):
    episode = make_episode()
    more = {"return_token_ids": True}
    completion = run(ask(client, n=2, logprobs=True, top_logprobs=3, extra_body=more), episode)
    for choice, call in zip(completion.choices, episode.calls, strict=True):
        assert tuple(completion.prompt_token_ids) == call.prompt_ids == tuple(choice.message.prompt_token_ids)
        assert tuple(choice.token_ids) == call.token_ids == tuple(choice.message.generation_token_ids)
        assert tuple(choice.message.generation_log_probs) == call.sampler_logprobs
        entries = choice.logprobs.content
        assert tuple(entry.logprob for entry in entries) == call.sampler_logprobs
        assert tuple(entry.token_id for entry in entries) == call.token_ids
        assert all(len(entry.top_logprobs) == 3 for entry in entries)

    async def last_chunks():
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return [chunk async for chunk in await ask(client, extra_body=more, **options)][-2:]

    end, last = run(last_chunks(), make_episode())
    for ids, logprobs in (
        (end.choices[0].token_ids, end.choices[0].delta.generation_log_probs),
        (last.usage.completion_token_ids, last.usage.logprobs),
    ):
        assert tuple(ids) == episode.calls[0].token_ids
        assert tuple(logprobs) == episode.calls[0].sampler_logprobs


def test_other_apis_are_refused_with_a_way_out(client):
    episode = make_episode()
    with pytest.raises(openai.BadRequestError, match=r"chat\.completions\.create"):
        run(client.completions.create(model="player", prompt="x?"))
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: served are"):
        run(client.embeddings.create(model="player", input="x?"))
    with pytest.raises(openai.NotFoundError, match="GET /v1/responses/resp_1: served are"):
        run(client.with_options(base_url=episode.base_url).responses.retrieve("resp_1"))
    with pytest.raises(openai.APIStatusError, match="POST /v1/chat/completions") as caught:
        run(client.get("/chat/completions", cast_to=object))
    assert caught.value.status_code == 405


def test_models_and_health_are_told(client, policy):
    (model,) = run(client.models.list()).data
    assert (model.id, model.max_model_len) == ("player", policy.engine.max_context_tokens)
    assert run(client.models.retrieve("player")) == model
    with pytest.raises(openai.NotFoundError, match="plaxer"):
        run(client.models.retrieve("plaxer"))
    assert run(client.with_options(base_url="http://jaxft.invalid").get("/health", cast_to=object)) == {"status": "ok"}


def test_an_app_may_serve_several_models(policy):
    transport = async_transport(http_library(), make_app({name: ChatClient(policy, name) for name in ("one", "two")}))
    http = http_library().AsyncClient(transport=transport)
    client = openai.AsyncOpenAI(base_url=f"{ENDPOINT}/v1", api_key="any", http_client=http)
    for name in ("one", "two"):
        assert run(ask(client, model=name, max_tokens=2)).model == name


def test_fifty_early_closes_leave_no_slot_in_use(policy, client):
    async def leave(episode):
        with recording(episode):
            stream = await ask(client, stream=True, max_tokens=None, **NEVER_ENDS)
            async for _ in stream:
                break
            await stream.close()

    async def main():
        await asyncio.gather(*map(leave, episodes))

    episodes = [make_episode(generation=number) for number in range(50)]
    run(main())
    assert is_idle(policy)


def test_a_time_out_is_openais_and_cancels_the_call(client, sync_client, policy, blocked):
    for stream in (False, True):
        with pytest.raises(openai.APITimeoutError):
            run(ask(client, timeout=0.05, stream=stream))
        with pytest.raises(openai.APITimeoutError):
            ask(sync_client, timeout=0.05, stream=stream)

    async def limited():
        async with asyncio.timeout(0.05):
            await ask(client)

    with pytest.raises(TimeoutError):
        run(limited())
    assert all(running.future.cancelled() for running in policy.engine._scheduler.waiting)


def test_a_thread_records_by_base_url_or_key_or_is_counted(client, sync_client):
    episode, expected = make_episode(), make_episode()
    with recording(expected):
        for _ in range(3):
            ask(sync_client)

    def work():
        ask(sync_client.with_options(base_url=episode.base_url))
        ask(sync_client.with_options(api_key=episode.api_key))
        return asyncio.run(
            client.with_options(api_key=episode.api_key).chat.completions.create(
                model="player", messages=QUESTION, max_tokens=8
            )
        )

    before = outside_calls()
    in_thread(work)
    assert episode.calls == expected.calls and outside_calls() == before
    in_thread(lambda: ask(sync_client))
    assert outside_calls() == before + 1 and len(episode.calls) == 3


def test_a_key_of_no_episode_is_refused(sync_client):
    episode = make_episode()
    key, url = episode.api_key, episode.base_url
    assert make_episode().api_key != key and key not in repr(episode)
    del episode
    for gone in (sync_client.with_options(api_key=key), sync_client.with_options(base_url=url)):
        with pytest.raises(openai.AuthenticationError, match=r"jaxft\.episode"):
            ask(gone)


def test_the_end_of_an_episode_cancels_the_calls_of_its_threads(client, sync_client, policy, blocked):
    episode = make_episode()
    url = episode.base_url
    errors = []

    def expect_cancellation(work):
        try:
            work()
        except BaseException as error:
            errors.append(type(error))

    async def main():
        with recording(episode):
            inherits = asyncio.to_thread(expect_cancellation, lambda: ask(sync_client))
            own_loop = asyncio.to_thread(expect_cancellation, lambda: asyncio.run(ask_in(client)))
            named = threading.Thread(
                target=expect_cancellation, args=(lambda: ask(sync_client.with_options(base_url=url)),)
            )
            named.start()
            threads = asyncio.gather(inherits, own_loop)
            while len(policy.engine._scheduler.waiting) < 3:
                await asyncio.sleep(0.01)
            assert episode.end()
            await threads
            await asyncio.to_thread(named.join)
            with pytest.raises(asyncio.CancelledError):
                await ask(client)

    async def ask_in(client):
        return await ask(client)

    run(main())
    assert errors == [asyncio.CancelledError] * 3


def test_a_synchronous_call_may_block_the_loop_of_its_episode(sync_client):
    async def main():
        return ask(sync_client).choices[0].message.content

    episode = make_episode()
    assert run(main(), episode) == episode.calls[0].content


@pytest.mark.parametrize("n", [1, 3])
def test_each_reply_tells_the_policy_version_that_sampled_it(make_policy, n):
    policy = make_policy()
    client = framework_client(ChatClient(policy, "player"), "openai")

    async def main():
        with blocking(policy) as release:
            more = {"return_token_ids": True}
            asking = [asyncio.create_task(ask(client, max_tokens=40, n=n, extra_body=more)) for _ in range(16)]
            while len(policy.engine._scheduler.waiting) < 16 * n or not policy.engine._is_scheduled:
                await asyncio.sleep(0)
            # Behind the first step of the engine, which admits as many requests as there are slots.
            updating = asyncio.create_task(policy.update(lambda params: ({**params}, None)))
            await asyncio.sleep(0)
            release()
            await updating
        return await asyncio.gather(*asking)

    episode = make_episode()
    versions = set()
    for reply in run(main(), episode):
        ids = {tuple(choice.token_ids) for choice in reply.choices}
        calls = [call for call in episode.calls if call.token_ids in ids]
        told = [int(version) for version in reply.system_fingerprint.removeprefix("policy_version_").split("_")]
        assert set(told) == {call.reply.policy_version for call in calls} and len(calls) == n >= len(told)
        versions |= set(told)
    assert versions == {0, 1}


def test_a_lost_policy_is_a_503_that_the_episode_keeps(make_policy):
    policy = make_policy()
    client = framework_client(ChatClient(policy, "player"), "openai")

    async def main():
        with pytest.raises(ZeroDivisionError):
            await policy.update(lambda params: 1 // 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as caught:
            await ask(client)
        assert caught.value.status_code == 503 and "Traceback" not in str(caught.value)

    episode = make_episode()
    run(main(), episode)
    assert isinstance(episode.policy_error, PolicyError)


def test_tools_without_a_template_for_them_are_a_400_that_the_episode_keeps_until_an_answer(make_policy, tokenizer):
    policy, plain = make_policy(), copy.deepcopy(tokenizer)
    plain.chat_template = "{{ messages[-1].content }}"
    policy.template = ChatTemplate(plain, policy.template.stop_ids)
    client = framework_client(ChatClient(policy, "player"), "openai")

    async def main():
        with pytest.raises(openai.BadRequestError, match="response_template") as caught:
            await ask(client, tools=TOOLS)
        kept.append(episode.policy_error)
        await ask(client)
        return caught.value.param

    episode, kept = make_episode(), []
    assert run(main(), episode) == "tools"
    assert isinstance(kept[0], ToolsUnsupportedError) and episode.policy_error is None

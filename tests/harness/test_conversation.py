"""Conversations with a stub and with tiny policies: lines, commands, tools, signals."""

import asyncio
import io
import os
import signal

import pytest

from jaxft.errors import NonFiniteError, PolicyLostError, PromptTooLongError, RequestError
from jaxft.harness.chat_tools import Tools, load_tools
from jaxft.harness.conversation import MAX_ROUNDS, Conversation
from jaxft.harness.runtime import exit_code_of
from jaxft.rollout.chat_request import Delta, Reply
from jaxft.rollout.client import ChatClient
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.messages import ToolCall
from jaxft.runs.console import current_console


class Terminal(io.StringIO):
    """Lines that are typed."""

    def isatty(self):
        return True


class Stub(LanguageModel):
    """Gives replies one after the other; an exception is raised, and a list is streamed and never ends."""

    name, max_context_tokens = "stub", 100

    def __init__(self, *replies):
        self.requests, self._replies = [], list(replies)

    async def answer(self, request, on_delta=None):
        self.requests.append(request)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, list):
            for token_id, text in enumerate(reply):
                on_delta(Delta(0, text, token_ids=(token_id,), logprobs=(-1.0,)))
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if reply.reasoning_content:
            on_delta(Delta(0, reasoning_content=reply.reasoning_content))
        for character in reply.content:
            on_delta(Delta(0, character))
        return reply

    def token_text(self, token_id):
        return f"<{token_id}>"

    async def check(self):
        pass

    def contents(self, number=-1):
        """Role and content of every message of a request."""
        return [(message["role"], message["content"]) for message in self.requests[number].messages]


def reply(content="", *calls, reasoning=None, finish_reason="stop"):
    made = tuple(ToolCall(f"call{number:05}", *call) for number, call in enumerate(calls))
    return Reply(content, finish_reason, (7, 8), (-0.5, -1.5), 0, None, (1, 2, 3), made, reasoning)


@pytest.fixture
def talk(monkeypatch, capsys):
    """Runs a conversation of these lines, and returns exit code, standard output and standard error."""

    def talk(llm, *lines, tools=None, typed=False, **settings):
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", Terminal(text) if typed else io.StringIO(text))

        async def run():
            await Conversation(llm, tools or Tools(), current_console(), **settings).run()

        code = exit_code_of(run, on_stderr=True)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return talk


def test_each_line_of_a_pipe_is_a_message(talk):
    llm = Stub(reply("Hello."), reply("two\nlines", reasoning="hm"))
    code, out, err = talk(llm, "hi", "", "and\\", "more", system="Be brief.", temperature=0.5, max_tokens=9)
    assert (code, out, err) == (0, "Hello.\ntwo\nlines\n", "hm\n")
    first, second = llm.requests
    assert (first.temperature, first.max_tokens) == (0.5, 9)
    expected = [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello."), ("user", "and\nmore")]
    assert llm.contents() == expected
    assert second.messages[2]["content"] == "Hello."


def test_commands(talk):
    llm = Stub(*(reply(text) for text in "abcdef"))
    lines = ["/retry", "1", "/retry", "2", "/system Be kind.", "3", "/reset", "4", "/system", "5"]
    code, out, err = talk(llm, *lines, "/help", "/no", "/quit", "6", typed=True)
    assert code == 0 and "there is no message yet" in err and "no command /no" in err
    assert llm.contents(1) == [("user", "1")]  # asked again
    assert llm.contents(2) == [("user", "1"), ("assistant", "b"), ("user", "2")]
    assert llm.contents(3) == [("system", "Be kind."), *llm.contents(2), ("assistant", "c"), ("user", "3")]
    assert llm.contents(4) == [("system", "Be kind."), ("user", "4")]
    assert llm.contents(5) == [("user", "4"), ("assistant", "e"), ("user", "5")] and len(llm.requests) == 6
    assert all(command in out for command in ("/reset", "/retry", "/system", "/tokens", "/quit"))


def test_a_message_may_begin_with_a_slash_behind_a_space(talk):
    llm = Stub(reply("a"))
    assert talk(llm, " /etc is a folder")[0] == 0
    assert llm.contents() == [("user", " /etc is a folder")]


def test_the_tokens_of_the_last_answer(talk):
    _, out, err = talk(Stub(reply("ab", finish_reason="length")), "/tokens", "x", "/tokens", max_tokens=2)
    assert "no answer yet" in err and "--max-tokens" in err
    first, *rows = out.splitlines()[1:]
    assert "3 tokens of prompt, 2 tokens sampled, finish_reason length, logprob -2.0000 (-1.0000 a token)" in first
    assert [row.split() for row in rows] == [["0", "7", "-0.5000", "'<7>'"], ["1", "8", "-1.5000", "'<8>'"]]


def test_ctrl_c_ends_an_answer_and_not_the_chat(talk):
    llm = Stub(["so ", "far"], reply("b"), [], reply("c"))
    code, out, err = talk(llm, "1", "/tokens", "2", "3", "4", typed=True)
    assert code == 0 and out.count("so far\n") == 1
    assert "2 tokens sampled, finish_reason none, as Ctrl-C ended it, logprob -2.0000" in out
    assert llm.contents(1) == [("user", "1"), ("assistant", "so far"), ("user", "2")]
    assert "the answer so far is kept" in err and "the message is taken back" in err
    assert llm.contents(3) == [*llm.contents(1), ("assistant", "b"), ("user", "4")]


def test_ctrl_c_in_a_pipe_ends_the_program(talk):
    code, out, _ = talk(Stub(["so ", "far"], reply("b")), "1", "2")
    assert code == 130 and out == "so far\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools_of_a_conversation.py"
    path.write_text(
        'def add(a: int, b: int) -> int:\n    """Add.\n\n    Args:\n        a: one.\n        b: another.\n    """\n'
        "    return a + b\n\n"
        'async def fail():\n    """Fail."""\n    raise ValueError("no")\n\n'
        'def hang():\n    """Take long."""\n    import os, signal, time\n'
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
    )
    return load_tools(path)


def test_tools_are_called_until_the_model_answers(talk, tools):
    llm = Stub(
        reply("Well.", ("add", '{"a": 1, "b": 2}'), ("fail", "{}")),
        reply("", ("add", '{"a": 1}'), ("sub", "{}")),
        reply("Done."),
    )
    code, out, err = talk(llm, "1 + 2?", tools=tools)
    assert (code, out) == (0, "Well.\nDone.\n")
    assert [tool["function"]["name"] for tool in llm.requests[0].tools] == ["add", "fail", "hang"]
    results = [message for message in llm.requests[2].messages if message["role"] == "tool"]
    assert [result["content"] for result in results[:2]] == ["3", "error: ValueError: no"]
    assert results[2]["content"].startswith("error: missing") and "'sub'" in results[3]["content"]
    assert [result["tool_call_id"] for result in results] == ["call00000", "call00001"] * 2
    assert err.startswith('add({"a": 1, "b": 2})\n= 3\nfail({})\n= error: ValueError: no\nadd({"a": 1})\n')


def test_tools_are_not_called_for_ever(talk, tools):
    llm = Stub(*[reply("", ("add", '{"a": 1, "b": 2}'))] * MAX_ROUNDS, reply("b"))
    code, _, err = talk(llm, "1", "2", tools=tools, typed=True)
    assert code == 0 and f"{MAX_ROUNDS} times" in err and llm.contents() == [("user", "2")]


def test_ctrl_c_ends_a_tool(talk, tools):
    llm = Stub(reply("", ("hang", "{}")), reply("b"))
    assert talk(llm, "1", "2", tools=tools, typed=True)[0] == 0
    assert llm.contents() == [("user", "2")]


def test_results_of_tools_without_code_are_typed(talk):
    schemas = [{"type": "function", "function": {"name": "look_up"}}]
    llm = Stub(reply("", ("look_up", '{"city": "Oslo"}')), reply("3"), reply("", ("look_up", "{}")))
    code, out, err = talk(llm, "1", "three", "2", tools=Tools(schemas))
    assert llm.requests[1].messages[-1]["content"] == "three"
    assert code == 2 and out == "3\n" and 'look_up({"city": "Oslo"})' in err  # the input ends before the second result


def test_what_cannot_be_answered_does_not_end_the_chat(talk):
    llm = Stub(PromptTooLongError.of("200 tokens", 100), RequestError("half of a character"), reply("c"))
    code, out, err = talk(llm, "1", "2", "3")
    assert code == 2 and out == "c\n" and llm.contents() == [("user", "3")]
    full, refused, last = err.splitlines()
    assert "100 tokens" in full and "/reset" in full and "half of a character" in refused
    assert last == "jaxft: error: lines without a complete answer: 2"
    assert talk(Stub(RequestError("no"), reply("c")), "1", "2", typed=True)[0] == 0


@pytest.mark.parametrize("error", [PolicyLostError("lost"), NonFiniteError("nan")])
def test_errors_of_the_policy_end_the_chat(talk, error):
    code, out, err = talk(Stub(error, reply("b")), "1", "2", typed=True)
    assert code == 1 and str(error) in err.splitlines()[-1] and "b" not in out.splitlines()


def test_answers_cannot_steer_the_terminal(talk):
    _, out, err = talk(Stub(reply("a\x1b[31m", reasoning="\x07")), "1")
    assert (out, err) == ("a\\x1b[31m\n", "\\x07\n")


@pytest.fixture(scope="module")
def answering(policy):
    """The policy after a first conversation, for which it has compiled its programs."""

    async def run():
        await Conversation(ChatClient(policy), Tools(), current_console(), max_tokens=8, seed=0).run()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdin", io.StringIO("x\ny\n"))
        assert exit_code_of(run, on_stderr=True) == 0
    return policy


def test_the_history_goes_on_from_the_sampled_tokens(talk, answering):
    answered = []

    class Kept(ChatClient):
        async def answer(self, request, on_delta=None):
            answered.append(await super().answer(request, on_delta))
            return answered[-1]

    def ids(seed):
        answered.clear()
        assert talk(Kept(answering), "x", "/retry", "y", "/reset", "x", max_tokens=8, seed=seed)[0] == 0
        return [each.token_ids for each in answered]

    once = ids(3)
    _, second, third, _ = answered
    whole = (*second.prompt_ids, *second.token_ids)
    assert third.prompt_ids[: len(whole)] == whole  # bytes that are no text would not survive a detour over text
    assert len(set(once)) == 4 and ids(3) == once


def test_half_of_a_character_does_not_end_the_chat(talk, answering):
    code, _, err = talk(ChatClient(answering), "\ud800", "x", max_tokens=4, typed=True)
    assert code == 0 and "U+D800" in err and "the message is taken back" in err and err.count("cut off") == 1


def test_a_full_context_does_not_end_the_chat(talk, answering):
    code, _, err = talk(ChatClient(answering), "x" * 200, "x", "/quit", max_tokens=4, typed=True)
    assert code == 0 and f"the context of {answering.engine.max_context_tokens} tokens" in err
    assert err.count("cut off after 4 tokens") == 1


@pytest.fixture(scope="module")
def calling(answering, make_scripted_policy, tokenizer, tools):
    """A policy that asks `add` for 2 + 3, and then says the sum."""
    asked = answering.template.prompt([{"role": "user", "content": "x?"}], tools=tools.schemas[:1]).ids
    parts = ['<call:add>{"a":2,"b":3}</call><|end|>', "<|tool|>5<|end|><|assistant|>", "It is 5.<|end|>"]
    script = [*asked, *(token for part in parts for token in tokenizer.encode(part))]
    return make_scripted_policy(script + [script[-1]] * (512 - len(script)))


def test_a_model_calls_a_tool(talk, calling, tools):
    code, out, err = talk(ChatClient(calling), "x?", tools=Tools(tools.schemas[:1], tools.functions))
    assert (code, out, err) == (0, "It is 5.\n", 'add({"a": 2, "b": 3})\n= 5\n')

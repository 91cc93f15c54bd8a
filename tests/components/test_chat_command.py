"""The verb `chat`: where its model is found, a conversation in a terminal and in a pipe, and the tools of one."""

import asyncio
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxft.cli import main
from jaxft.components.chat_command import MAX_ROUNDS, Conversation, call_tool, load_functions, tool_schema
from jaxft.components.model_source import model_configuration
from jaxft.core.partition import ADAPTER
from jaxft.errors import ConfigError, NonFiniteError, PolicyLostError, PromptTooLongError, RequestError
from jaxft.harness.commands import open_models
from jaxft.harness.config import load_models
from jaxft.harness.runtime import run_main
from jaxft.models.config import LoraSpec
from jaxft.models.hf import save_model
from jaxft.models.load import init_model
from jaxft.models.peft import save_adapter
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.chat_request import ChatRequest, Delta
from jaxft.rollout.client import ChatClient
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.messages import ToolCall
from jaxft.runs.console import current_console

# A parent that runs in the background has SIGINT ignored.
PROGRAM = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from jaxft.cli import main
sys.exit(main())
"""

SHORT = ("--context-tokens", 96)
"""A context for which other tests have compiled already."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("models") / "model"
    model, params = init_model("qwen3-50k", jax.random.key(0))
    save_model(folder, model, params, tokenizer=tokenizer)
    return folder


def chat(monkeypatch, capsys, *arguments, text=b"hi\n"):
    """Exit code and output of the verb, in this process."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    code = main(["chat", *map(str, arguments)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def finished_run(model_folder, tmp_path):
    """Makes a run directory with a model and a configuration that has these settings of its policy."""

    def make(**settings):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "model").symlink_to(model_folder)
        policy = {"_type": "local_policy", "preset": "qwen3-50k", **settings}
        sections = {
            "imports": ["/nowhere/agent.py"],
            "llms": {"judge": {"_type": "openai", "model": "m"}, "policy": policy},
            "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
            "finetuning": {"trainer_adapter": "local"},
        }
        (tmp_path / "run" / "config.yml").write_text(json.dumps(sections))
        return tmp_path / "run"

    return make


def test_a_chat_in_a_script_writes_nothing_to_a_run(finished_run, monkeypatch, capsys):
    folder = finished_run(max_context_tokens=77)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    code, out, err = chat(monkeypatch, capsys, folder, "--max-tokens", 8, "--seed", 1, *SHORT, text=b"hi\n\xff")
    assert code == 0 and err.count("cut off after 8 tokens") == 2
    assert "\x1b" not in out + err and out.endswith("\n")
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))} == before


def test_the_settings_of_a_run_are_the_defaults(finished_run, model_folder):
    def fields(source, **options):
        (made,) = model_configuration(source, **options)["llms"].values()
        return made["max_context_tokens"], made["dtype"], made["slots"]

    folder = finished_run(max_context_tokens=77, dtype="bfloat16", slots=3)
    assert fields(folder) == (77, "bfloat16", 3)
    assert fields(folder, context_tokens=50)[0] == fields(model_folder, context_tokens=50)[0] == 50
    assert fields(model_folder)[:2] == (4096, "float32")


def test_settings_that_cannot_be_are_named(finished_run, monkeypatch, capsys):
    folder = finished_run(mesh={"data": 4, "fsdp": 2, "tensor": 16})
    code, _, err = chat(monkeypatch, capsys, folder)
    assert code == 2 and err.count("\n") == 1 and "llms.policy" in err and "tensor 16" in err
    text = (folder / "config.yml").read_text().replace('"data": 4', '"data": "four"')
    (folder / "config.yml").write_text(text)
    code, _, err = chat(monkeypatch, capsys, folder)
    assert code == 2 and "llms.policy.mesh.data" in err and str(folder / "config.yml") in err


@pytest.fixture(scope="module")
def with_adapters(model_folder, tmp_path_factory, tokenizer):
    """Parameters of a model with adapters, and what a run that holds it loads: with a base of its own, and without."""
    model, params = init_model("qwen3-50k", jax.random.key(0), lora=LoraSpec(2, 4.0, ("q_proj",), False))
    params = jax.device_get(params)
    params |= {ADAPTER: jax.tree.map(lambda leaf: leaf + np.float32(0.5), params[ADAPTER])}

    async def load(run):
        async with open_models(load_models(model_configuration(run, context_tokens=96), [], "run")) as builder:
            policy = (await builder.get_llm("policy")).policy
            return policy.model.lora.rank, await policy.read(jax.device_get)

    runs = [tmp_path_factory.mktemp("adapters") / "run" for _ in range(2)]
    for run, base in zip(runs, (None, str(model_folder)), strict=True):
        save_adapter(run / "model", model, params, base=base, tokenizer=tokenizer)
    return params, [asyncio.run(load(run)) for run in runs]


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_with_adapters(with_adapters, which):
    params, loaded = with_adapters
    rank, found = loaded[which]
    assert rank == 2
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_model_of_the_hub_is_found_where_it_was_downloaded(model_folder, tmp_path, monkeypatch, capsys):
    """The hub's cache, as `huggingface_hub` writes it, without a network."""
    cache = tmp_path / "models--somebody--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / ("0" * 40)).symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert chat(monkeypatch, capsys, "somebody/tiny", "--max-tokens", 2, *SHORT)[0] == 0
    for is_offline in (True, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # refuses connections
        code, _, err = chat(monkeypatch, capsys, "somebody/else")
        assert code == 2 and err.count("\n") == 1 and "somebody/else" in err


def test_a_folder_without_a_model_says_what_to_do(tmp_path, monkeypatch, capsys):
    def refusal(folder=tmp_path):
        code, out, err = chat(monkeypatch, capsys, folder)
        assert code == 2 and out == "" and err.count("\n") == 1 and str(folder) in err
        return err

    assert "give a run directory" in refusal()
    assert "give a run directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "config.yml").write_text("llms: {}")
    assert "no model yet" in refusal()
    assert not (tmp_path / "LOCK").exists()
    for step in ("9", "12"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "manifest.json").write_text("{}")
    assert f"jaxft resume {tmp_path} --set finetuning.num_epochs=12" in refusal()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    assert "config.json" in refusal()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--template-kwargs", "tokenize=true"], "'tokenize'"),
        (["--system", "\ud800"], "U+D800"),
        (["--tools", "nowhere.py"], "nowhere.py"),
    ],
)
def test_options_that_cannot_be_are_one_line(model_folder, monkeypatch, capsys, options, reason):
    code, out, err = chat(monkeypatch, capsys, model_folder, *options)
    assert code == 2 and out == "" and err.count("\n") == 1 and reason in err


def test_tools_that_the_template_cannot_take_are_refused_before_the_first_message(
    model_folder, tmp_path, monkeypatch, capsys
):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    (tmp_path / "model" / "manifest.json").unlink()
    tools = tmp_path / "tools_of_no_template.py"
    tools.write_text('def look():\n    """Look around."""\n')
    code, out, err = chat(monkeypatch, capsys, tmp_path / "model", "--tools", tools, *SHORT, text=b"hi\nhi\n")
    assert code == 2 and out == "" and err.count("\n") == 1 and "response_template" in err


@pytest.mark.parametrize(
    "option", ["--temperature=-1", "--max-tokens=0", "--seed=-1", "--template-kwargs=a", "--context-tokens=x"]
)
def test_options_say_what_they_want(capsys, option):
    with pytest.raises(SystemExit):
        main(["chat", "folder", option])
    assert f"{option.partition('=')[0]}: wants " in capsys.readouterr().err


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

    async def count_tokens(self, request):
        return len(request.messages)

    def token_text(self, token_id):
        return f"<{token_id}>"

    async def check(self):
        pass

    def contents(self, number=-1):
        """Role and content of every message of a request."""
        return [(message["role"], message["content"]) for message in self.requests[number].messages]


def reply(content="", *calls, reasoning=None):
    made = tuple(ToolCall(f"call{number:05}", *call) for number, call in enumerate(calls))
    completion = Completion([7, 8], [-0.5, -1.5], [], [0, 0], "stop")
    return Reply(content, completion, (1, 2, 3), tool_calls=made, reasoning_content=reasoning)


@pytest.fixture
def talk(monkeypatch, capsys):
    """Runs a conversation of these lines, and returns exit code, standard output and standard error."""

    def talk(llm, *lines, functions=None, typed=False, system=(), seed=0, **settings):
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: typed
        monkeypatch.setattr("sys.stdin", stdin)
        functions = functions or {}
        schemas = [tool_schema(name, function) for name, function in functions.items()]

        async def run():
            request = ChatRequest(messages=list(system), tools=schemas, **settings)
            await Conversation(llm, functions, request, current_console(), seed).run()

        code = run_main(run, on_stderr=True)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return talk


def test_each_line_of_a_pipe_is_a_message(talk):
    llm = Stub(reply("Hello."), reply("two\nlines", reasoning="hm"), reply("a\x1b[31m", reasoning="\x07"))
    system = [{"role": "system", "content": "Be brief."}]
    code, out, err = talk(llm, "hi", "", "more", "/reset", "3", system=system, temperature=0.5, max_tokens=9)
    assert (code, out, err) == (0, "Hello.\ntwo\nlines\na\\x1b[31m\n", "hm\n\\x07\n")  # nothing steers the terminal
    assert [(each.temperature, each.max_tokens) for each in llm.requests] == [(0.5, 9)] * 3
    assert llm.contents(1) == [("system", "Be brief."), ("user", "hi"), ("assistant", "Hello."), ("user", "more")]
    assert llm.contents() == [("system", "Be brief."), ("user", "3")]


@pytest.mark.parametrize("typed", [False, True])
def test_ctrl_c_ends_the_program(talk, typed):
    code, out, _ = talk(Stub(["so ", "far"], reply("b")), "1", "2", typed=typed)
    assert code == 130 and out == "so far\n"


def test_what_cannot_be_answered_does_not_end_the_chat(talk):
    llm = Stub(PromptTooLongError.of("200 tokens", 100), RequestError("half of a character"), reply("c"))
    code, out, err = talk(llm, "1", "2", "3")
    assert code == 2 and out == "c\n" and llm.contents() == [("user", "3")]
    full, refused, last = err.splitlines()
    assert "100" in full and "/reset" in full and "half of a character" in refused
    assert last == "jaxft: error: lines without an answer: 2"
    assert talk(Stub(RequestError("no"), reply("c")), "1", "2", typed=True)[0] == 0


@pytest.mark.parametrize("error", [PolicyLostError("lost"), NonFiniteError("nan")])
def test_errors_of_the_policy_end_the_chat(talk, error):
    code, out, err = talk(Stub(error, reply("b")), "1", "2", typed=True)
    assert code == 1 and str(error) in err.splitlines()[-1] and "b" not in out.splitlines()


TOOLS = '''
import asyncio
from json import dumps  # a function, which is no tool as the file only imports it

def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return _sum(a, b)

async def look_up(city: str) -> str:
    """Look up a city.

    Args:
        city: its name.
    """
    await asyncio.sleep(0)
    return city.upper()

def leave():
    """End the program."""
    raise SystemExit(3)

def strange(kind: str):
    """Return something strange.

    Args:
        kind: which.
    """
    return {"half": "\\ud800", "set": {1}, "nothing": None, "list": [1.5, "\\u00e9"]}[kind]

def hang():
    """Take long."""
    import os, signal, time
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

def _sum(a, b):
    return a + b

class Thing:
    """No function."""
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "tools_of_a_chat.py"
    path.write_text(TOOLS)
    return load_functions(path)


def test_public_functions_of_a_file_are_tools(functions):
    assert [*functions] == ["add", "look_up", "leave", "strange", "hang"]
    function = tool_schema("add", functions["add"])["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["b"] == {"type": "integer", "description": "the second number."}
    assert function["parameters"]["required"] == ["a"]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", '{"a": 2}', "3"),
        ("look_up", '{"city": "Oslo"}', "OSLO"),
        ("strange", '{"kind": "nothing"}', "null"),
        ("strange", '{"kind": "list"}', '[1.5, "é"]'),
        ("strange", '{"kind": "half"}', "?"),
        ("strange", '{"kind": "no"}', "error: KeyError: 'no'"),
        ("leave", "{}", "error: SystemExit: 3"),
        ("strange", '{"kind": "set"}', "error: TypeError: Object of type set is not JSON serializable"),
        ("adds", '{"a": 2}', "error: .* no function 'adds'; did you mean 'add'?"),
        ("add", "{}", "error: .* a Missing required argument .*"),
        ("add", '{"a": 1, "c": 2}', "error: .* c Unexpected keyword argument .*"),
        ("add", '{"a": "x"}', "error: .* a Input should be a valid integer.*"),
    ],
)
def test_the_result_of_a_call_is_text(functions, name, arguments, expected):
    result = asyncio.run(call_tool(functions, ToolCall("abcdefghi", name, arguments)))
    assert re.fullmatch(expected.replace("?", r"\?").replace("[", r"\["), result)


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("def add(a: int): return a", ":3: the function 'add'", "no docstring"),
        ('def add(a):\n    """Add.\n\n    Args:\n        a: it.\n    """', ":3: the function 'add'", "a type hint"),
        ('def add(a: int):\n    """Add."""', ":3: the function 'add'", "no description for the argument 'a'"),
        (
            'def add(a: "Nowhere"):\n    """Add.\n\n    Args:\n        a: it.\n    """',
            ":3: the function 'add'",
            "Nowhere",
        ),
        ("", "", "holds no tool"),
        ("1 / 0", "", "ZeroDivisionError"),
    ],
)
def test_a_file_whose_functions_cannot_be_tools_is_refused(tmp_path, text, place, reason):
    path = tmp_path / f"tools_{tmp_path.name}.py"  # another name each time, as modules are imported once
    path.write_text(f"\n\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        for name, function in load_functions(path).items():
            tool_schema(name, function)
    said = str(refused.value)
    assert f"{path}{place}" in said and reason in said


def test_tools_are_called_until_the_model_answers(talk, functions):
    llm = Stub(
        reply("Well.", ("add", '{"a": 1, "b": 2}'), ("strange", '{"kind": "no"}')),
        reply("", ("sub", "{}")),
        reply("Done."),
    )
    code, out, err = talk(llm, "1 + 2?", functions=functions)
    assert (code, out) == (0, "Well.\nDone.\n")
    assert [tool["function"]["name"] for tool in llm.requests[0].tools] == [*functions]
    results = [message for message in llm.requests[2].messages if message["role"] == "tool"]
    assert [result["content"] for result in results[:2]] == ["3", "error: KeyError: 'no'"]
    assert [result["tool_call_id"] for result in results] == ["call00000", "call00001", "call00000"]
    assert err.startswith('add({"a": 1, "b": 2})\n= 3\nstrange({"kind": "no"})\n= error: ')


def test_tools_are_not_called_for_ever(talk, functions):
    llm = Stub(*[reply("", ("add", '{"a": 1, "b": 2}'))] * MAX_ROUNDS, reply("b"))
    code, _, err = talk(llm, "1", "2", functions=functions, typed=True)
    assert code == 0 and f"{MAX_ROUNDS} times" in err and llm.contents() == [("user", "2")]


@pytest.fixture(scope="module")
def calling(policy, make_scripted_policy, tokenizer, functions):
    """A policy that asks `add` for 2 + 3, and then says the sum."""
    schemas = [tool_schema("add", functions["add"])]
    asked = policy.template.prompt([{"role": "user", "content": "x?"}], tools=schemas).ids
    parts = ['<call:add>{"a":2,"b":3}</call><|end|>', "<|tool|>5<|end|><|assistant|>", "It is 5.<|end|>"]
    script = [*asked, *(token for part in parts for token in tokenizer.encode(part))]
    return make_scripted_policy(script + [script[-1]] * (512 - len(script)))


def test_a_model_calls_a_tool(talk, calling, functions):
    code, out, err = talk(ChatClient(calling), "x?", functions={"add": functions["add"]})
    assert (code, out, err) == (0, "It is 5.\n", 'add({"a": 2, "b": 3})\n= 5\n')


def test_the_history_goes_on_from_the_sampled_tokens(talk, policy):
    answered = []

    class Recorded(ChatClient):
        async def answer(self, request, on_delta=None):
            answered.append(await super().answer(request, on_delta))
            return answered[-1]

    def ids(seed):
        answered.clear()
        lines = ("x", "y", "\ud800", "x" * 200, "/reset", "x")  # the third and the fourth are refused, and taken back
        assert talk(Recorded(policy), *lines, max_tokens=8, seed=seed, typed=True)[0] == 0
        return [each.token_ids for each in answered]

    once = ids(3)
    first, second, _ = answered
    whole = (*first.prompt_ids, *first.token_ids)
    assert second.prompt_ids[: len(whole)] == whole  # bytes that are no text would not survive a detour over text
    assert len(set(once)) == 3 and ids(3) == once


@pytest.mark.slow
def test_a_chat_in_a_terminal(model_folder):
    """A greedy answer of this model goes on until the context is full: Ctrl-C ends the chat."""
    terminal, program = os.openpty()
    command = [sys.executable, "-c", PROGRAM, "chat", str(model_folder), "--context-tokens", "30000"]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(
        [*command, "--temperature", "0"], stdin=program, stdout=program, stderr=program, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(program)
    shown = b""

    def wait_for(text):
        nonlocal shown
        while not (found := re.search(text, shown, re.DOTALL)):
            assert select.select([terminal], [], [], 60)[0], shown
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                raise AssertionError(shown) from None
        shown = shown[found.end() :]

    wait_for(rb"/reset begins.*> ")
    os.write(terminal, b"h\xc3\xa9\n")
    wait_for(rb"h\xc3\xa9\r\n.{20}")  # the line is echoed, and the model is at work
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    os.close(terminal)

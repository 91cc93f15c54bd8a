"""The verb `chat`: a conversation of a terminal, or of a script's lines, with a model that may call Python functions.

Answers go to standard output, all else to standard error. Nothing is written to a run directory and nothing is locked,
so that a chat may run beside the training of its model.
"""

import argparse
import asyncio
import contextlib
import inspect
import io
import json
import os
import pkgutil
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import validate_call

from jaxft.components.model_source import model_configuration
from jaxft.errors import ConfigError, RequestError, UserCodeError, did_you_mean, user_code
from jaxft.harness.commands import open_models
from jaxft.harness.config import load_models
from jaxft.harness.registry import import_module
from jaxft.harness.runtime import run_main
from jaxft.rollout.calls import Reply
from jaxft.rollout.chat_request import ChatRequest
from jaxft.rollout.client import ChatClient
from jaxft.rollout.current import recording
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.messages import Tool, ToolCall
from jaxft.rollout.recorder import VALIDATION, Episode
from jaxft.runs.console import Console, current_console

MAX_ROUNDS = 20
"""Number of answers to one message that may call tools."""
WANTED = "a tool needs a docstring that says what it does, and a type hint and a line under 'Args:' for each argument"

Functions = Mapping[str, Callable[..., Any]]


def run_chat(parsed: argparse.Namespace, given: Sequence[str]) -> int:
    """Talk to the model that the command line names, and return the exit code; standard output is for the answers."""
    title = f"chat {parsed.source}" if sys.stdin.isatty() else None
    return run_main(lambda: chat(parsed), title=title, log_level="warning", on_stderr=True)


async def chat(arguments: argparse.Namespace) -> None:
    """Talk to the model of `arguments.source` until the input ends.

    Raises:
        ConfigError: the source holds no model, or the tools cannot be used.
        RequestError: the chat template refuses an option or tools; or a message has no answer, and the input is no
            terminal.
    """
    functions = {} if arguments.tools is None else load_functions(arguments.tools)
    settings = ChatRequest(
        messages=[] if arguments.system is None else [{"role": "system", "content": arguments.system}],
        tools=[tool_schema(name, function) for name, function in functions.items()],
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        chat_template_kwargs=dict(arguments.template_kwargs),
    )
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    models = model_configuration(arguments.source, context_tokens=arguments.context_tokens)
    ((name, fields),) = models["llms"].items()
    if fields["mesh"] is None:
        fields |= {"slots": 1, "cache_tokens": None, "sampler_mesh": None}
    console = current_console()
    console.status(f"loading {arguments.source}")
    async with open_models(load_models(models, [], str(arguments.source)), seed=seed) as builder:
        llm: ChatClient = await builder.get_llm(name)
        console.close()  # the live line stands between standard output and whoever looks for it
        question = [*settings.messages, {"role": "user", "content": "?"}]
        await llm.count_tokens(replace(settings, messages=question))  # refuses now what every message would meet
        try:
            await Conversation(llm, functions, settings, console, seed).run()
        except BrokenPipeError:
            # Whoever read the answers has gone; Python flushes standard output once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Conversation:
    """A conversation of standard input with a language model.

    It is an episode, so that its history goes on from the sampled token ids, as in training.
    """

    def __init__(
        self, llm: LanguageModel, functions: Functions, settings: ChatRequest, notes: Console, seed: int = 0
    ) -> None:
        """Begin a conversation; `settings` holds all but the messages, `notes` shows everything but the answers."""
        self._llm, self._functions, self._settings, self._notes, self._seed = llm, functions, settings, notes, seed
        self._output, self._is_terminal = Console(), sys.stdin.isatty()
        self._num_conversations = 0
        self._begin()

    def _begin(self) -> None:
        """Begin anew, with random numbers that no conversation before had."""
        self._messages = list(self._settings.messages)
        self._num_conversations += 1
        self._episode = Episode(self._seed, VALIDATION, self._num_conversations, "chat", 0)

    async def run(self) -> None:
        """Answer each line of the input until it ends; `/reset` begins a new conversation.

        Raises:
            RequestError: the input is no terminal, and a line has no answer.
        """
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are no text must not end the chat
        if self._is_terminal:
            self._note(f"{self._llm.max_context_tokens} tokens of context; /reset begins a new conversation")
        unanswered = 0
        while (line := await self._read_line()) is not None:
            if line == "/reset":
                self._begin()
            elif line.strip():
                begun = len(self._messages)
                try:
                    await self._answer(line)
                except RequestError as error:
                    self._note(f"error: {error}; the message is taken back, and /reset begins a new conversation")
                    del self._messages[begun:]  # what is left is a conversation that a chat template takes
                    unanswered += 1
        if unanswered and not self._is_terminal:
            raise RequestError(f"lines without an answer: {unanswered}")

    async def _read_line(self) -> str | None:
        """Return the next line of the input, None at its end."""
        try:
            if not self._is_terminal:
                return input()
            # In a thread, so that Ctrl-C is heard while it waits.
            return await asyncio.to_thread(input, "> " if sys.stdout.isatty() else "")
        except EOFError:
            self._output.write("\n" if self._is_terminal else "")
            return None

    async def _answer(self, text: str) -> None:
        """Add a message and its answer to the conversation, with the tool calls between them."""
        self._messages.append({"role": "user", "content": text})
        with recording(self._episode):
            for _ in range(MAX_ROUNDS):
                reply = await self._sample()
                self._messages.append(reply.message)
                if not reply.tool_calls:
                    return
                for call in reply.tool_calls:
                    self._note(f"{call.name}({call.arguments})")
                    result = await call_tool(self._functions, call)
                    self._note(f"= {result}")
                    self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise RequestError(f"the model called tools {MAX_ROUNDS} times in a row without an answer")

    async def _sample(self) -> Reply:
        """Return the next answer, shown as it is sampled; reasoning and content begin lines of their own."""
        line: Console | None = None  # the console with a part of the answer and no line break yet
        request = replace(self._settings, messages=tuple(self._messages))
        async with contextlib.aclosing(self._llm.stream(request)) as stream:
            try:
                async for piece in stream:
                    if isinstance(piece, Reply):
                        break
                    for console, text in ((self._notes, piece.reasoning_content), (self._output, piece.content)):
                        if text and line not in (None, console):
                            line.write("\n")
                        if text:
                            console.write(text, "dim" if console is self._notes else "")
                            line = None if text.endswith("\n") else console
            finally:
                if line is not None:
                    line.write("\n")
        assert isinstance(piece, Reply)
        if piece.finish_reason == "length":
            self._note(f"cut off after {len(piece.token_ids)} tokens, by --max-tokens or the context")
        return piece

    def _note(self, text: str) -> None:
        self._notes.write(f"{text}\n", "dim")


def load_functions(file: Path) -> dict[str, Callable[..., Any]]:
    """Return the public functions that a Python file defines, by name.

    Raises:
        ConfigError: the file cannot be imported, or defines none.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: is no file of Python functions")
    import_module(str(file.absolute()))
    module = vars(sys.modules[file.stem])
    own = {name: each for name, each in module.items() if inspect.isfunction(each) and each.__module__ == file.stem}
    functions: dict[str, Any] = {name: each for name, each in own.items() if not name.startswith("_")}
    if not functions:
        raise ConfigError(f"{file}: holds no tool; write a function whose name does not begin with '_': {WANTED}")
    return functions


def tool_schema(name: str, function: Callable[..., Any]) -> Tool:
    """Return the schema of a function in OpenAI's format, from its type hints and its docstring.

    Raises:
        ConfigError: one of them is missing.
    """
    # Not imported above: it announces that PyTorch is missing, unless jaxft.rollout.chat was imported before.
    get_json_schema = pkgutil.resolve_name("transformers.utils:get_json_schema")
    try:
        schema = get_json_schema(function)
    except Exception as error:  # of the hints and docstring of the user, in the classes of transformers
        code = inspect.unwrap(function).__code__
        place = f"{code.co_filename}:{code.co_firstlineno}"
        raise ConfigError(f"{place}: the function '{name}' cannot be a tool: {error}; {WANTED}") from error
    return {**schema, "function": {**schema["function"], "name": name}}


async def call_tool(functions: Functions, call: ToolCall) -> str:
    """Call a function and return its result as text: a text itself, JSON of another value, or `error: ...`.

    Arguments are checked against the type hints. A function that is not async runs in a thread, so that it can be left
    while it runs.
    """
    if call.name not in functions:
        return f"error: there is no function '{call.name}'{did_you_mean(call.name, functions, what='functions')}"
    try:
        with user_code():
            checked = validate_call(functions[call.name])
            result = await asyncio.to_thread(checked, **json.loads(call.arguments))
            result = await result if inspect.isawaitable(result) else result
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except UserCodeError as failure:
        return f"error: {failure.summary}"
    return text.encode(errors="replace").decode()  # half of a character would be refused as a message

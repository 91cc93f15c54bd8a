"""A conversation of a person, or of a script, with a language model: lines come in, answers are streamed out.

Answers go to standard output, everything else to the console of notes.
"""

import asyncio
import contextlib
import io
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxft.errors import PromptTooLongError, RequestError
from jaxft.harness.chat_tools import Tools, call_tool
from jaxft.harness.signals import current_shutdown
from jaxft.rollout.chat_request import ChatRequest, Delta, Reply
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import VALIDATION, Episode, recording
from jaxft.runs.console import Console

MAX_ROUNDS = 20
"""Number of answers to one message that may call tools."""

SECONDS_UNSEEN = 1.0
"""Seconds without a token after which a line says that the model is at work."""

HELP = """\
/reset        begin a new conversation; the system message stays
/retry        answer the last message again
/system TEXT  set the system message from the next answer on; without a text, leave it out
/tokens       show the tokens of the last answer, with ids and log-probabilities
/quit         end, as Ctrl-D and Ctrl-C do; Ctrl-C during an answer ends only the answer
A message goes on after a line that ends with \\. One that begins with / needs a space before it."""


class Answer(NamedTuple):
    """An answer as `/tokens` shows it; `prompt_tokens` is None if Ctrl-C ended the answer."""

    prompt_tokens: int | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class Conversation:
    """A conversation of standard input with a language model.

    Each conversation is an episode, so that its history goes on from the sampled token ids, as in training.

    Attributes:
        messages: the conversation so far, without the system message.
    """

    def __init__(
        self,
        llm: LanguageModel,
        tools: Tools,
        notes: Console,
        *,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        system: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Begin a conversation; `ChatRequest` explains the arguments.

        Args:
            llm: the language model.
            tools: the tools that it may call.
            notes: shows everything but the answers.
            temperature, max_tokens: settings of every answer.
            system: the system message; None for none.
            template_kwargs: variables of the chat template.
            seed: seed of the episode.
        """
        self.messages: list[dict[str, Any]] = []
        self._llm, self._tools = llm, tools
        self._temperature, self._max_tokens, self._template_kwargs = temperature, max_tokens, template_kwargs
        self._system, self._seed = system, seed
        self._num_conversations = 0
        self._episode = self._new_episode()
        self._asked: tuple[int, str] | None = None  # the last message, and its place
        self._answers: list[Answer] = []  # to the last message
        self._shown = ""  # text of the answer that is being sampled
        self._is_terminal = sys.stdin.isatty()
        self._output, self._notes = Console(), notes
        self._open_line: Console | None = None  # with a part of an answer and no line break yet

    def request(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """Return the request for the next answer.

        Raises:
            RequestError: a setting is impossible.
        """
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return ChatRequest(
            messages=[*system, *messages],
            tools=self._tools.schemas,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            chat_template_kwargs=self._template_kwargs,
        )

    async def run(self) -> None:
        """Read messages and commands, and answer them, until the input ends or `/quit`.

        Raises:
            RequestError: the input is no terminal, and a line has no complete answer.
        """
        shutdown = current_shutdown() if self._is_terminal else None
        # Ctrl-C between an answer and the next prompt has no effect.
        with contextlib.nullcontext() if shutdown is None else shutdown.interruptible(lambda: None):
            unanswered = await self._run()
        if unanswered and not self._is_terminal:
            raise RequestError(f"lines without a complete answer: {unanswered}")

    async def _run(self) -> int:
        """Answer all lines, and return the number of those without a complete answer."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # bytes that are no text must not end the chat
        if self._is_terminal:
            with contextlib.suppress(ImportError):  # some Pythons are built without it
                import readline  # noqa: F401  # its import gives `input` a history and editing

            about = [f"{self._llm.max_context_tokens} tokens of context", f"temperature {self._temperature:g}"]
            tools = [f"tools {', '.join(self._tools.names)}"] if self._tools.names else []
            self._notes.message("; ".join([*about, *tools, "/help shows the commands"]))
        unanswered = 0
        while (text := self._read_message()) is not None:
            command, _, rest = text.partition(" ")
            if not text.strip():
                continue
            if command == "/quit":
                break
            if command == "/retry" and self._asked is not None:
                place, text = self._asked
                del self.messages[place:]
            elif text.startswith("/"):
                unanswered += not self._obey(command, rest.strip())
                continue
            unanswered += not await self._take(text)
        return unanswered

    def _obey(self, command: str, text: str) -> bool:
        """Carry out a command other than `/quit`, and return True if that could be done."""
        if command == "/help":
            self._output.message(HELP)
        elif command == "/tokens":
            self._show_tokens()
        elif command == "/system":
            self._system = text or None
            self._notes.message("the system message is set" if text else "there is no system message")
        elif command == "/reset":
            self.messages, self._asked, self._answers = [], None, []
            self._episode = self._new_episode()
            self._notes.message("a new conversation")
        elif command == "/retry":
            self._notes.message("there is no message yet to answer again")
            return False
        else:
            self._notes.message(f"there is no command {command}; /help shows all, and a space before it sends it")
            return False
        return True

    async def _take(self, text: str) -> bool:
        """Answer a message, and return True if its answer is complete; SIGINT ends the answer only."""
        self._asked, self._answers = (len(self.messages), text), []
        shutdown = current_shutdown() if self._is_terminal else None
        turn = asyncio.create_task(self._answer(text))
        with contextlib.nullcontext() if shutdown is None else shutdown.interruptible(turn.cancel):
            try:
                await turn
                return True
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                kept = "the answer so far is kept" if self._shown else "the message is taken back"
                self._note(f"stopped; {kept}, /retry asks again")
            except PromptTooLongError:
                limit = self._llm.max_context_tokens
                self._note(
                    f"the conversation does not fit the context of {limit} tokens, so the message is taken back: "
                    "/reset begins a new one, and --context-tokens gives a chat more"
                )
            except RequestError as error:
                self._note(f"error: {error}; the message is taken back")
        return False

    async def _answer(self, text: str) -> None:
        """Add a message and its answer to the conversation, with the tool calls between them."""
        begun, self._shown = len(self.messages), ""
        self.messages.append({"role": "user", "content": text})
        try:
            with recording(self._episode):
                for _ in range(MAX_ROUNDS):
                    reply = await self._sample()
                    self.messages.append(reply.message)
                    self._shown = ""  # it is in the message
                    if not reply.tool_calls:
                        return
                    for call in reply.tool_calls:
                        result = await self._result(call)
                        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            raise RequestError(f"the model called tools {MAX_ROUNDS} times in a row without an answer")
        except BaseException:
            # What is left is a conversation that a chat template takes: each message has its answer.
            if self._shown:
                self.messages.append({"role": "assistant", "content": self._shown})
            else:
                del self.messages[begun:]
            raise

    async def _sample(self) -> Reply:
        """Return the next answer, shown as it is sampled."""
        pieces: list[Delta] = []
        sign = asyncio.get_running_loop().call_later(SECONDS_UNSEEN, self._notes.status, "sampling")
        stream = self._llm.stream(self.request(self.messages))
        try:
            async for piece in stream:
                if not pieces:
                    sign.cancel()
                    self._notes.close()
                if isinstance(piece, Reply):
                    break
                pieces.append(piece)
                self._show(piece)
        except asyncio.CancelledError:
            token_ids = tuple(token for piece in pieces for token in piece.token_ids)
            logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
            self._answers.append(Answer(None, token_ids, logprobs, "none, as Ctrl-C ended it"))
            raise
        finally:
            sign.cancel()
            self._notes.close()
            await stream.aclose()
            self._end_line()
        assert isinstance(piece, Reply)
        self._answers.append(Answer(len(piece.prompt_ids), piece.token_ids, piece.logprobs, piece.finish_reason))
        if piece.finish_reason == "length":
            is_own = len(piece.token_ids) == self._max_tokens
            limit = "--max-tokens" if is_own else "the context: /reset begins a new conversation"
            self._note(f"cut off after {len(piece.token_ids)} tokens by {limit}")
        elif not piece.content and not piece.tool_calls:
            self._note("the answer is empty")
        return piece

    async def _result(self, call: ToolCall) -> str:
        """Return the result of a tool call: that of the function, or what the user types."""
        self._note(f"{call.name}({call.arguments})")
        if self._tools.functions or call.name not in self._tools.names:
            result = await call_tool(self._tools, call)
            self._note(f"= {result}")
            return result
        try:
            return self._read_line("= ")
        except (EOFError, KeyboardInterrupt) as end:
            self._end_prompt(end)
            raise asyncio.CancelledError from None

    def _read_message(self) -> str | None:
        """Return the next message or command, of one line or several; None at the end of the input."""
        lines: list[str] = []
        try:
            while True:
                lines.append(self._read_line("... " if lines else "> "))
                if not lines[-1].endswith("\\"):
                    break
                lines[-1] = lines[-1][:-1]
        except (EOFError, KeyboardInterrupt) as end:
            self._end_prompt(end)
            if not lines or isinstance(end, KeyboardInterrupt):
                return None
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        """Return the next line of the input; the event loop waits meanwhile.

        Raises:
            EOFError: the input has ended.
            KeyboardInterrupt: Ctrl-C.
        """
        shutdown = current_shutdown()
        with contextlib.nullcontext() if shutdown is None else shutdown.released():
            if self._is_terminal and sys.stdout.isatty():
                return input(prompt)
            if self._is_terminal:  # `input` would write the prompt between the answers
                self._notes.write(prompt)
            line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _end_prompt(self, end: EOFError | KeyboardInterrupt) -> None:
        """End the line of a prompt that Ctrl-D or Ctrl-C has left; in a pipe SIGINT ends the program instead."""
        if isinstance(end, KeyboardInterrupt) and not self._is_terminal:
            raise end
        self._output.write("\n" if self._is_terminal else "")

    def _show(self, piece: Delta) -> None:
        """Show a piece of an answer; reasoning and content begin lines of their own."""
        self._shown += piece.content
        for console, text, style in ((self._notes, piece.reasoning_content, "dim"), (self._output, piece.content, "")):
            if text:
                if self._open_line is not console:
                    self._end_line()
                console.write(text, style)
                self._open_line = None if text.endswith("\n") else console

    def _end_line(self) -> None:
        """End the line that an answer has begun, if any."""
        if self._open_line is not None:
            self._open_line.write("\n")
            self._open_line = None

    def _note(self, text: str) -> None:
        """Show a line about the answer, dimmed."""
        self._end_line()
        self._notes.write(f"{text}\n", "dim")

    def _show_tokens(self) -> None:
        """Show ids, log-probabilities and texts of the tokens of the answers to the last message."""
        if not self._answers:
            self._notes.message("there is no answer yet")
        for number, answer in enumerate(self._answers, start=1):
            prompt = "" if answer.prompt_tokens is None else f"{answer.prompt_tokens} tokens of prompt, "
            total = sum(answer.logprobs)
            mean = f" ({total / len(answer.logprobs):.4f} a token)" if answer.logprobs else ""
            self._output.message(
                f"answer {number} of {len(self._answers)}: {prompt}{len(answer.token_ids)} tokens sampled, "
                f"finish_reason {answer.finish_reason}, logprob {total:.4f}{mean}"
            )
            for place, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
                self._output.message(f"{place:5} {token:7} {logprob:9.4f}  {self._llm.token_text(token)!r}")

    def _new_episode(self) -> Episode:
        """Return the episode of the next conversation, which has random numbers of its own."""
        self._num_conversations += 1
        return Episode(self._seed, VALIDATION, self._num_conversations, "chat", 0)

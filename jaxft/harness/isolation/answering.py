"""The run answers what a worker asks while it works: requests of language models, in the episode of the work."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NamedTuple

from jaxft.errors import PolicyError, one_line
from jaxft.harness.isolation import messages
from jaxft.rollout.calls import Reply
from jaxft.rollout.language_model import LanguageModel
from jaxft.rollout.recorder import Episode, named_functions, recording


class RunSide(NamedTuple):
    """Functions of the run that serve its workers.

    Attributes:
        get_llm: returns a language model by its name.
        get_server_url: returns the address of the run's server, and starts it if it does not run.
        log: shows a message.
    """

    get_llm: Callable[[str], Coroutine[Any, Any, Any]]
    get_server_url: Callable[[], Coroutine[Any, Any, str]]
    log: Callable[[str], None]


class Answering:
    """The requests of a worker that are being answered for one work, in its episode."""

    def __init__(
        self, run: RunSide, send: Callable[[Any], None], known_texts: dict[str, set[int]], episode: Episode | None
    ) -> None:
        """Begin.

        Args:
            run: the functions of the run.
            send: sends a message to the worker.
            known_texts: ids of the tokens whose texts the worker knows, by the name of the language model.
            episode: the episode of the work; None outside of episodes.
        """
        self._run, self._send, self._known_texts, self._episode = run, send, known_texts, episode
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Any) -> None:
        """Take a message of the worker."""
        if isinstance(message, messages.Note):
            self._run.log(message.text)
        elif isinstance(message, messages.LogEntry):
            record = logging.makeLogRecord(message.record)
            logging.getLogger(record.name).handle(record)
        elif isinstance(message, messages.Cancel):
            if message.number in self._tasks:
                self._tasks[message.number].cancel()
        else:
            # A call outside of episodes is one of an empty context: it is counted as such.
            is_unknown = isinstance(message, messages.Ask) and message.place == "unknown"
            context = contextvars.Context() if is_unknown else contextvars.copy_context()
            task = asyncio.get_running_loop().create_task(self._answer(message), context=context)
            self._tasks[message.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(message.number))

    async def close(self) -> None:
        """Cancel all that is being answered."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, message: Any) -> None:
        try:
            answer = await self._answer_to(message)
        except asyncio.CancelledError as error:  # a thread that the agent left behind may wait
            self._send(messages.Refusal(message.number, messages.pack_error(error), ""))
            raise
        except Exception as error:
            if isinstance(error, PolicyError) and self._episode is not None:
                self._episode.policy_error = error
            answer = messages.Refusal(message.number, messages.pack_error(error), one_line(error))
        self._send(answer)

    async def _answer_to(self, message: Any) -> Any:
        if isinstance(message, messages.Find):
            llm = await self._run.get_llm(message.llm)
            return messages.Found(message.number, llm.max_context_tokens if isinstance(llm, LanguageModel) else None)
        if isinstance(message, messages.Serve):
            return messages.Served(message.number, await self._run.get_server_url())
        llm = await self._run.get_llm(message.llm)
        if isinstance(message, messages.Check):
            await llm.check()
            return messages.Answer(message.number, None, (), {})
        assert isinstance(message, messages.Ask)

        def send_piece(delta: Any) -> None:
            self._send(messages.Piece(message.number, delta))

        with _scope(message):
            reply = await llm.answer(message.request, send_piece if message.is_streamed else None)
        indices = {choice.call_index for choice in reply.choices}
        known = () if self._episode is None else tuple(self._episode.calls)
        calls = tuple(call for call in known if call.index in indices)
        return messages.Answer(message.number, reply, calls, self._new_texts(llm, reply))

    def _new_texts(self, llm: LanguageModel, reply: Reply) -> dict[int, str]:
        """Return the texts of the tokens of a reply that the worker does not know yet, by their ids."""
        known = self._known_texts.setdefault(llm.name, set())
        new = {token for choice in reply.choices for token in choice.token_ids} - known
        new |= {token for choice in reply.choices for most in choice.top_logprobs for token, _ in most} - known
        known |= new
        return {token: llm.token_text(token) for token in new}


@contextlib.contextmanager
def _scope(message: messages.Ask) -> Iterator[None]:
    """Run the block where the worker's call was made: under its functions, and in its episode or on purpose in none."""
    with contextlib.ExitStack() as stack:
        if message.place == "outside":
            stack.enter_context(recording(None))
        stack.enter_context(named_functions(message.functions))
        yield

"""The live policies of this process, by their model names, and the episodes of workflows that the toolkit itself runs.

The toolkit makes its components anew for every pass over a dataset, so a client of a policy is light: it finds the
policy here when it is called. Where jaxft runs the workflow, the episode is there already. Where the toolkit runs it,
as a builder of the toolkit's own does, `find_or_begin_episode` gives each of its runs an episode, so that its calls are
recorded and its random numbers can be repeated.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nat.builder.context import ContextState

from jaxft import ChatClient, Episode, EvalInputItem
from jaxft.errors import ComponentError
from jaxft.rollout import TRAINING, find_episode

_policies: dict[str, ChatClient] = {}
"""Live policies by model name."""

_alone: list[ChatClient] = []
"""Live policies that were made without a run."""


@contextmanager
def published(model_name: str, llm: ChatClient, *, is_alone: bool = False) -> Iterator[None]:
    """Make a policy available to all clients of this model name inside the block.

    A policy of a run replaces one that was made alone, for a call before the run was open.

    Raises:
        ComponentError: another policy has the name.
    """
    earlier = _policies.get(model_name)
    if earlier is not None and earlier not in _alone:
        raise ComponentError(f"two policies have the model_name '{model_name}': give one of them another")
    _policies[model_name] = llm
    if is_alone:
        _alone.append(llm)
    try:
        yield
    finally:
        if _policies.get(model_name) is llm:
            del _policies[model_name]
        if is_alone:
            _alone.remove(llm)


def live_policy(model_name: str) -> ChatClient | None:
    """Return the live policy of a model name; None if there is none."""
    return _policies.get(model_name)


@dataclass
class ToolkitEpisodes:
    """Episodes of the workflow runs that the toolkit starts, by their `workflow_run_id`.

    An example's runs of one collection are numbered in the order in which they first ask the policy. They have the same
    input, so that another order gives the same set of episodes.

    Attributes:
        is_recording: True while a run of jaxft is open; otherwise, as in a server, nobody wants the records.
        seed: seed of the run.
        collection: number of the present collection, from 0.
    """

    is_recording: bool = False
    seed: int = 0
    collection: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _example_ids: dict[str, str] = field(default_factory=dict)
    _begun: dict[str, Episode] = field(default_factory=dict)
    _generations: Counter[str] = field(default_factory=Counter)

    def begin_collection(self, collection: int) -> None:
        """Forget the episodes of earlier collections."""
        self.collection = collection
        self._begun.clear()
        self._generations.clear()

    @contextmanager
    def recording(self, seed: int, examples: Iterable[EvalInputItem]) -> Iterator[None]:
        """Record episodes inside the block; their random numbers depend on the seed and on the ids of the examples."""
        self.seed, self.is_recording = seed, True
        self._loop = asyncio.get_running_loop()  # episodes may begin in a thread, whose calls it answers
        self._example_ids = {_key(item.input_obj): item.id for item in examples}
        self.begin_collection(0)
        try:
            yield
        finally:
            self.is_recording = False
            self.begin_collection(0)

    def episode(self, run_id: str, input_obj: Any) -> Episode:
        """Return the episode of a workflow run, begun by its first call."""
        if run_id not in self._begun:
            key = _key(input_obj)
            example_id = self._example_ids.get(key, key)
            generation = self._generations[example_id]
            self._generations[example_id] += 1
            self._begun[run_id] = Episode(
                self.seed, TRAINING, self.collection, example_id, generation, input_obj=input_obj, _loop=self._loop
            )
        return self._begun[run_id]


toolkit_episodes = ToolkitEpisodes()
"""Episodes of this process."""


def find_or_begin_episode() -> Episode | None:
    """Return the current episode, or that of the toolkit's present workflow run; None without either."""
    current = find_episode()
    if current is not None or not toolkit_episodes.is_recording:
        return current
    state = ContextState.get()
    run_id = state.workflow_run_id.get()
    return None if run_id is None else toolkit_episodes.episode(run_id, state.input_message.get())


def function_path() -> list[str]:
    """Return the names of the toolkit's functions that the calling code runs in, outermost first."""
    return [name for name in ContextState.get().function_path_stack.get() or [] if name != "<workflow>"]


def _key(input_obj: Any) -> str:
    """Return a key of an input that is equal for equal inputs."""
    text = input_obj if isinstance(input_obj, str) else json.dumps(input_obj, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()

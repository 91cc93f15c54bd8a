"""`_type: single_turn`: an agent that answers a prompt once; and `_type: in_memory`, the prompts of a program as rows.

A prompt is a text, which the language model continues as it stands, or a chat, a list of messages, which goes through
the chat template; TRL treats prompts likewise.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from jaxft import (
    rollout,  # its names are imported when they are used: a configuration needs neither jax nor transformers
)
from jaxft.components.configs import LocalPolicyConfig
from jaxft.errors import ComponentError, ConfigError, DatasetError, RequestError
from jaxft.harness.arrow_datasets import without_added_nulls
from jaxft.harness.config import Config
from jaxft.harness.config_types import LLMRef
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.registry import DatasetConfig, WorkflowConfig
from jaxft.rollout.current import episode
from jaxft.rollout.messages import canonical_messages

PROMPT = "prompt"
"""Column of the prompts."""

RESERVED = (PROMPT, "prompts", "completion", "completions", "completion_ids")
"""Names that reward functions know in another meaning than that of a column."""

WANTED = "wanted is a list of texts, of chats (lists of messages) or of rows (dicts with a 'prompt'), or a dataset"


class SingleTurnConfig(WorkflowConfig, name="single_turn", factory="jaxft.components.single_turn:single_turn"):
    """An agent that asks the language model once, with the example's input, and returns the whole text of its answer.

    The input is a text, which the model continues as it stands, or a list of messages for the chat template.
    """

    llm: LLMRef
    """Entry of llms that answers."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer; null: as many as the context has room for."""
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Divisor of the logits."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Variables of the chat template, such as enable_thinking."""


class InMemoryDatasetConfig(DatasetConfig, name="in_memory", factory="jaxft.components.single_turn:in_memory"):
    """Examples that a program gave to `jaxft.train`; no file of the configuration has them."""

    items: tuple[EvalInputItem, ...] | None = Field(default=None, exclude=True)
    """The examples."""


async def in_memory(config: InMemoryDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples.

    Raises:
        DatasetError: the configuration was read from a file.
    """
    if config.items is None:
        raise DatasetError(
            "eval.general.dataset: its rows were given to jaxft.train by a program, and no file has "
            "them: call jaxft.train with them again, or set eval.general.dataset to a file"
        )
    yield list(config.items)


async def single_turn(
    config: SingleTurnConfig, builder: Any
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[str]]]:
    """Yield the workflow."""
    llm, has_warned = await builder.get_llm(config.llm), False

    async def answer(example: dict[str, Any]) -> str:
        prompt = episode().input_obj
        if not isinstance(prompt, str):
            await llm.chat(
                prompt,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                chat_template_kwargs=config.chat_template_kwargs,
            )
            return episode().calls[-1].full_text
        if not isinstance(llm, rollout.ChatClient):
            raise ComponentError(
                f"workflow: llms.{config.llm} is no model of this process, and so continues no text: give prompts as "
                "chats, or a local_policy without eval.general.isolation"
            )
        nonlocal has_warned
        template, model = llm.policy.template, builder.config.llms[config.llm]
        is_loaded = isinstance(model, LocalPolicyConfig) and model.path is not None
        if is_loaded and not has_warned and not template.has_chat_form(prompt):
            has_warned = True
            builder.console.message(
                f"prompts are texts, which llms.{config.llm} continues as they stand: no chat template is applied; for "
                f"answers to questions, give chats: [{{'role': 'user', 'content': {prompt[:30]!r}}}]"
            )
        ids = template.text_ids(prompt)
        request = rollout.CompletionRequest(
            prompt_ids=ids, max_tokens=config.max_tokens, temperature=config.temperature
        )
        return (await llm.answer(request)).content

    yield answer


def read_examples(prompts: Any, columns: Mapping[str, Any]) -> list[EvalInputItem]:
    """Return an example per prompt, with its prompt as input and its prompt and columns as row.

    Args:
        prompts: texts, chats, or rows with a column `prompt`: a list, or a dataset with `len` and integer indices.
        columns: further columns by name, each a list as long as `prompts`.

    Raises:
        DatasetError: a prompt, a row or a column is not as it should be; the message names it.
    """
    if isinstance(prompts, str | bytes | Mapping):
        hint = "take one split, as in dataset['train']" if isinstance(prompts, Mapping) else "write [prompt]"
        raise DatasetError(f"prompts is one {type(prompts).__name__}: {WANTED}: {hint}")
    try:
        count = len(prompts)
        rows = list(prompts) if count and prompts[0] is not None else []
    except (TypeError, LookupError):
        raise DatasetError(
            f"prompts is a {type(prompts).__name__}, which has no rows 0, 1, 2, ...: {WANTED}: read it whole, as by "
            "list(...) or .to_dict('records')"
        ) from None
    if not rows:
        raise DatasetError(f"prompts is empty or begins with None: {WANTED}")
    added = {name: _column(name, values, count) for name, values in columns.items()}
    is_table = not isinstance(prompts, list | tuple)
    tables = [_row(index, _plain(row, is_table)) for index, row in enumerate(rows)]
    for index, row in enumerate(tables):
        _check_columns(index, row, tables[0], added)
    full = [row | {name: values[index] for name, values in added.items()} for index, row in enumerate(tables)]
    return [
        EvalInputItem(id=str(index), input_obj=row[PROMPT], full_dataset_entry=row) for index, row in enumerate(full)
    ]


def context_tokens(
    config: Config, examples: Sequence[EvalInputItem], max_answer_tokens: int, validation: Sequence[EvalInputItem] = ()
) -> int:
    """Return the tokens of the longest prompt as the run renders it, with its answer, in a multiple of 16.

    Args:
        config: the configuration of a run.
        examples: its examples.
        max_answer_tokens: most tokens of an answer if the workflow has no `max_tokens`.
        validation: its held-out examples.

    Raises:
        DatasetError: a prompt has no tokens, or the chat template refuses it.
        ConfigError: no tokenizer can be loaded.
    """
    policy, workflow = config.llms["policy"], config.workflow
    assert isinstance(policy, LocalPolicyConfig)
    if not isinstance(workflow, SingleTurnConfig):  # an agent in its place, whose prompts are not known
        workflow = SingleTurnConfig(llm="policy")
    try:
        template = rollout.ChatTemplate(rollout.load_tokenizer(policy.tokenizer or policy.path), ())
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    variables = workflow.chat_template_kwargs
    longest = 0
    prompts = [(f"prompts[{index}]", item.input_obj) for index, item in enumerate(examples)]
    prompts += [(f"validation[{index}]", item.input_obj) for index, item in enumerate(validation)]
    for place, prompt in prompts:
        try:
            is_text = isinstance(prompt, str)
            ids = template.text_ids(prompt) if is_text else template.prompt(prompt, template_kwargs=variables).ids
        except RequestError as error:
            raise DatasetError(f"{place}: {error}") from None
        if not ids:
            raise DatasetError(f"{place} is {prompt!r}, which has no tokens to continue: write a text")
        longest = max(longest, len(ids))
    tokens = longest + (workflow.max_tokens or max_answer_tokens)
    return -(-tokens // 16) * 16  # equal shapes for nearly equal prompts


def _column(name: str, values: Any, count: int) -> list[Any]:
    listed = [_plain(value, False) for value in values]
    if len(listed) != count:
        raise DatasetError(f"column '{name}' has {len(listed)} values for {count} prompts")
    return listed


def _plain(value: Any, is_arrow: bool) -> Any:
    """Return a value with its arrays of objects as lists, which pandas makes of the lists in a parquet file."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _plain(value.tolist(), True)
    if isinstance(value, list):
        value = [_plain(each, is_arrow) for each in value]
    elif isinstance(value, Mapping):
        value = {name: _plain(each, is_arrow) for name, each in value.items()}
    return without_added_nulls(value) if is_arrow else value


def _row(index: int, row: Any) -> dict[str, Any]:
    """Return a prompt as a row."""
    place = f"prompts[{index}]"
    if isinstance(row, Mapping):
        if PROMPT not in row:
            hint = ": it is a message; write [[message, ...]] for one chat" if {"role", "content"} <= row.keys() else ""
            raise DatasetError(f"{place} has no column 'prompt', but {', '.join(map(str, row)) or 'nothing'}{hint}")
        return {**row, PROMPT: _prompt(f"{place}['prompt']", row[PROMPT])}
    return {PROMPT: _prompt(place, row)}


def _prompt(place: str, prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    try:
        return list(canonical_messages(prompt))
    except RequestError as error:
        raise DatasetError(f"{place} is {repr(prompt)[:50]}: wanted a text or a list of messages: {error}") from None


def _check_columns(index: int, row: Mapping[str, Any], first: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    for name in sorted({*row, *added} & {*RESERVED[1:]}):
        raise DatasetError(f"column '{name}': reward functions know this name in another meaning: rename the column")
    for name in sorted(row.keys() & added.keys()):
        raise DatasetError(f"column '{name}': the rows of prompts have it already: give one of the two")
    for name in sorted(row.keys() ^ first.keys()):
        has, lacks = (index, 0) if name in row else (0, index)
        raise DatasetError(f"prompts[{lacks}] has no column '{name}', which prompts[{has}] has: fill it with None")

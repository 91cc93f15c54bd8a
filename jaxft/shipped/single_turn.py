"""`_type: single_turn`: an agent that answers a prompt once; and `_type: in_memory`, the prompts of a program as rows.

A prompt is a text, which the language model continues as it stands, or a chat, a list of messages, which goes through
the chat template; TRL treats prompts likewise.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from jaxft.errors import ComponentError, ConfigError, DatasetError, RequestError
from jaxft.harness.config_types import LLMRef
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.registry import DatasetConfig, WorkflowConfig
from jaxft.rollout.messages import canonical_messages
from jaxft.rollout.recorder import episode

PROMPT = "prompt"
"""Column of the prompts."""

RESERVED = (PROMPT, "prompts", "completion", "completions", "completion_ids")
"""Names that reward functions know in another meaning than that of a column."""

WANTED = "wanted is a list of texts, of chats (lists of messages) or of rows (dicts with a 'prompt'), or a dataset"


class SingleTurnConfig(WorkflowConfig, name="single_turn"):
    """An agent that asks the language model once, with the example's input, and returns the whole text of its answer.

    The input is a text, which the model continues as it stands, or a list of messages for the chat template.
    """

    llm: LLMRef = Field(description="Entry of llms that answers.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of an answer; null: as many as the context has room for."
    )
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False, description="Divisor of the logits.")
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Variables of the chat template, such as enable_thinking."
    )


class InMemoryDatasetConfig(DatasetConfig, name="in_memory"):
    """Examples that a program gave to `jaxft.train`; a file of the configuration has their number only."""

    num_rows: int = Field(ge=1, description="Number of examples.")
    items: tuple[EvalInputItem, ...] | None = Field(default=None, exclude=True, description="The examples.")


async def in_memory(config: InMemoryDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the examples.

    Raises:
        DatasetError: the configuration was read from a file.
    """
    if config.items is None:
        raise DatasetError(
            f"eval.general.dataset: its {config.num_rows} rows were given to jaxft.train by a program, and no file has "
            "them: call jaxft.train with them again, or set eval.general.dataset to a file"
        )
    yield list(config.items)


async def single_turn(
    config: SingleTurnConfig, builder: Any
) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[str]]]:
    """Yield the workflow."""
    # Imported here, as they import JAX, which reading a configuration does without.
    from jaxft.rollout.chat_request import CompletionRequest
    from jaxft.rollout.client import ChatClient

    llm = await builder.get_llm(config.llm)

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
        if not isinstance(llm, ChatClient):
            raise ComponentError(
                f"workflow: llms.{config.llm} is no model of this process, and so continues no text: give prompts as "
                "chats, or a local_policy without eval.general.isolation"
            )
        ids = llm.policy.template.tokenizer(prompt)["input_ids"]
        request = CompletionRequest(prompt_ids=ids, max_tokens=config.max_tokens, temperature=config.temperature)
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
    tables = [_row(index, row) for index, row in enumerate(rows)]
    for index, row in enumerate(tables):
        _check_columns(index, row, tables[0], added)
    full = [row | {name: values[index] for name, values in added.items()} for index, row in enumerate(tables)]
    return [
        EvalInputItem(id=str(index), input_obj=row[PROMPT], full_dataset_entry=row) for index, row in enumerate(full)
    ]


def longest_prompt(examples: Sequence[EvalInputItem], path: str | None) -> int:
    """Return the number of tokens of the longest prompt, in the tokenizer of a checkpoint; None: the embedded one.

    Raises:
        DatasetError: a prompt has no tokens, or the chat template refuses it.
        ConfigError: no tokenizer can be loaded.
    """
    from jaxft.rollout.chat import ChatTemplate, load_tokenizer  # imports transformers, which a configuration needs not

    try:
        tokenizer = load_tokenizer(path)
    except ValueError as error:
        raise ConfigError([f"model: {error}"]) from error
    template = ChatTemplate(tokenizer, ())
    longest = 0
    for index, prompt in enumerate(item.input_obj for item in examples):
        try:
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else template.prompt(prompt).ids
        except RequestError as error:
            raise DatasetError(f"prompts[{index}]: {error}") from None
        if not ids:
            raise DatasetError(f"prompts[{index}] is {prompt!r}, which has no tokens to continue: write a text")
        longest = max(longest, len(ids))
    return longest


def _column(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise DatasetError(f"column '{name}' is {repr(values)[:50]}: wanted a list with a value per prompt, {count}")
    listed = list(values)
    if len(listed) != count:
        raise DatasetError(f"column '{name}' has {len(listed)} values for {count} prompts")
    return listed


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

import asyncio
import functools
import math
import sys

import numpy as np
import pytest

from jaxft.components.evaluators import (
    RewardFunctionsConfig,
    check_functions,
    load_reward_functions,
    reward_function,
    reward_functions,
    reward_keywords,
)
from jaxft.errors import ConfigError
from jaxft.harness.config import config_from_mapping, resolved_yaml
from jaxft.harness.data_models import EvalInputItem
from jaxft.harness.evaluators import to_scalar


def items(outputs, prompt="say", **columns):
    row = {"prompt": prompt, **columns}
    return [EvalInputItem(id="0", input_obj=prompt, output_obj=each, full_dataset_entry=row) for each in outputs]


def rewards(function, outputs, prompt="say", **columns):
    episodes = items(outputs, prompt, **columns)
    given = reward_function(function).rewards(reward_keywords(episodes, with_ids=True), in_thread=False)
    return asyncio.run(given)


def test_a_function_of_all_completions_gets_the_keywords_that_its_signature_takes():
    seen = {}

    def of_all(completions, prompts, answer, **kwargs):
        seen.update(kwargs)
        return [len(each) for each in completions]

    assert rewards(of_all, ["a", "bcd"], answer="7", level=2) == [1.0, 3.0]
    assert seen == {"level": [2, 2], "completion_ids": [[], []]}
    assert rewards(lambda completions: np.array([0.5, 1.0], np.float32), ["a", "b"], answer="7") == [0.5, 1.0]
    assert rewards(lambda answer: [float(each) for each in answer], ["a", "b"], answer="7") == [7.0, 7.0]


def test_a_function_of_one_completion_gets_single_values():
    def exact(completion, prompt, answer):
        return prompt == "say" and completion == answer

    async def later(completion, answer="none"):
        await asyncio.sleep(0)
        return None if completion == answer else len(completion)

    assert rewards(exact, ["7", "8"], answer="7") == [1.0, 0.0]
    assert rewards(later, ["7", "88"], answer="7") == [None, 2.0]
    assert rewards(functools.partial(later, answer="8"), ["7", "88"]) == [1.0, 2.0]


def test_completions_of_chats_are_messages_as_in_trl():
    chat = [{"role": "user", "content": "say"}]
    seen = []

    def keep(completions, prompts):
        seen.extend([completions, prompts])
        return [float("nan") for _ in completions]

    assert rewards(keep, ["7"], chat) == [None]  # NaN is no score, as in TRL
    assert seen == [[[{"role": "assistant", "content": "7"}]], [chat]]


def broken(completion):
    return 1 / (len(completion) - 1)


@pytest.mark.parametrize(
    "function, shown",
    [
        (lambda completions: [1.0], "1 values for 2 completions"),
        (lambda completions: 1.0, "returned 1.0"),
        (lambda completions: "ab", "returned 'ab' for 2 completions"),
        (lambda completions: None, "returned None"),
        (lambda completions: [broken(each) for each in completions], "raised ZeroDivisionError: division by zero, at "),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_the_function_file_and_line(function, shown):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        rewards(function, ["a", "b"])
    assert shown in str(caught.value) and place_of(function) in str(caught.value)


async def broken_later(completion):
    return 1 / (len(completion) - 1)


@pytest.mark.parametrize(
    "function, shown",
    [
        (lambda completions: ["b", 1.0], "'b' (str) for completion 0"),
        (lambda completion: 1.0 if len(completion) > 1 else [1.0], "[1.0] (list) for completion 0"),
        (broken, f"raised ZeroDivisionError: division by zero, at {__file__}:{broken.__code__.co_firstlineno + 1} in"),
        (broken_later, f"division by zero, at {__file__}:{broken_later.__code__.co_firstlineno + 1} in"),
    ],
)
def test_an_error_of_one_completion_is_of_this_one_alone(function, shown):
    error, reward = rewards(function, ["a", "bc"])
    assert isinstance(error, Exception) and reward == 1.0
    assert shown in str(error) and place_of(function) in str(error)


def place_of(function):
    return f"'{function.__name__}' ({__file__}:{function.__code__.co_firstlineno})"


def test_functions_are_checked_at_the_door():
    examples = items(["a"], answer="7")
    for reward, shown in [
        (lambda text: [1.0], "takes 'text', but there are completions, prompts, completion_ids, answer"),
        (lambda completion, anwser: 1.0, "'anwser'"),
        (lambda: [1.0], "takes no keywords"),
        (len, "'len' takes no keywords"),
        (int, "<class 'int'> is no function"),
        ("a judge", "'a judge' is no place of a function"),
        (3, "3 is no function"),
        ([], "an empty list"),
        ([broken, broken], "named 'broken'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_reward_functions(reward, examples)
        assert shown in str(caught.value)
    assert [each.metric for each in load_reward_functions([broken, lambda completions: [1.0]], examples)] == [
        "broken",
        "<lambda>",
    ]
    mixed = [*items(["a"], answer="7"), *items(["a"])]
    with pytest.raises(ConfigError, match="'answer'"):  # which one of the rows does not have
        check_functions([reward_function(lambda completion, answer: 1.0)], mixed)


def test_a_file_names_functions_by_their_place(tmp_path):
    (tmp_path / "my_own_rewards.py").write_text("def brevity(completions):\n    return [0.0] * len(completions)\n")
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "say"}\n')
    mapping = {
        "workflow": {"_type": "single_turn", "llm": "policy"},
        "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k"}},
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": str(data)}},
            "evaluators": {"reward": {"_type": "reward_functions", "functions": ["my_own_rewards:brevity"]}},
        },
    }
    try:
        config = config_from_mapping(mapping, base_dir=tmp_path)
        assert "my_own_rewards:brevity" in resolved_yaml(config)
        mapping["eval"]["evaluators"]["reward"]["functions"] = ["my_own_rewards:brevty", "no_such_module:f"]
        with pytest.raises(ConfigError) as caught:
            config_from_mapping(mapping, base_dir=tmp_path)
    finally:
        sys.modules.pop("my_own_rewards", None)
        sys.path[:] = [path for path in sys.path if path != str(tmp_path)]
    assert "eval.evaluators.reward.functions.0: the module 'my_own_rewards' has no 'brevty'" in str(caught.value)
    assert "eval.evaluators.reward.functions.1" in str(caught.value) and "no_such_module" in str(caught.value)


def test_none_is_left_out_of_the_sum_and_stays_under_the_name_of_the_function():
    def even(completion):
        return 1.0 if completion == "4" else None

    def odd(completions):
        return [math.nan if each in "24" else 0.5 for each in completions]

    async def scored():
        class Builder:
            async def get_dataset(self):
                return items(["2"])

        evaluators = reward_functions(RewardFunctionsConfig(functions=(even, odd)), Builder())
        return await (await anext(evaluators))(items(["4", "7", "2"]))

    scores = asyncio.run(scored())
    assert scores == [{"even": 1.0, "odd": None}, {"even": None, "odd": 0.5}, {"even": None, "odd": None}]
    assert [to_scalar(score) for score in scores] == [1.0, 0.5, None]


def test_infinite_rewards_stay_for_the_harness_to_refuse():
    assert rewards(lambda completion: math.inf, ["a"]) == [math.inf]

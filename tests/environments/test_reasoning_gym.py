import asyncio
import json
import sys

import pytest

from jaxft.environments import ReasoningGymDatasetConfig, ReasoningGymScoreConfig
from jaxft.environments.reasoning_gym import dataset, questions, score
from jaxft.errors import ComponentError, ConfigError

SUMS = {"max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_parentheses": False, "allow_negation": False}


def load(**options):
    return asyncio.run(anext(dataset(ReasoningGymDatasetConfig(**options), None)))


@pytest.mark.envs
def test_questions_are_those_of_the_package_each_asked_once():
    import reasoning_gym

    items = load(task="basic_arithmetic", options=SUMS, size=300, seed=7)
    entries = list(reasoning_gym.create_dataset("basic_arithmetic", seed=7, size=300, **SUMS))
    assert [item.input_obj for item in items] == list(dict.fromkeys(entry["question"] for entry in entries))
    assert len({item.id for item in items}) == len(items) < 300
    assert items[0].expected_output_obj == entries[0]["answer"]


@pytest.mark.envs
def test_questions_to_leave_out_are_not_there():
    held_out = {item.input_obj for item in load(task="spell_backward", size=50, seed=1)}
    kept = load(task="spell_backward", size=2000, options={"max_word_len": 4}, without={"seed": 1, "size": 50})
    without = {item.input_obj for item in questions("spell_backward", {"max_word_len": 4}, 1, 50)}
    assert without.isdisjoint(item.input_obj for item in kept) and held_out and len(kept) > 500


@pytest.mark.envs
@pytest.mark.parametrize(
    "task", ["basic_arithmetic", "spell_backward", "decimal_arithmetic", "mini_sudoku", "time_intervals"]
)
def test_scores_are_those_of_the_task(task):
    import reasoning_gym

    evaluate = asyncio.run(anext(score(ReasoningGymScoreConfig(), None)))
    items = load(task=task, size=5)
    for item in items:
        entry = {name: value for name, value in item.full_dataset_entry.items() if name != "task_options"}
        for answer in (item.expected_output_obj, f"{item.expected_output_obj}0", "", None):
            expected = reasoning_gym.create_dataset(task, size=1, seed=0).score_answer(answer=answer, entry=entry)
            assert evaluate(item.model_copy(update={"output_obj": answer})) == expected
        assert evaluate(item.model_copy(update={"output_obj": item.expected_output_obj})) == 1.0


@pytest.mark.envs
def test_options_decide_the_score_where_the_task_uses_them():
    evaluate = asyncio.run(anext(score(ReasoningGymScoreConfig(), None)))
    places = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    (item,) = [each for each in load(task="decimal_arithmetic", size=3, options=places) if "1.1*9.5" in each.input_obj]
    strict = item.model_copy(update={"full_dataset_entry": {**item.full_dataset_entry, "task_options": {}}})
    scores = [evaluate(each.model_copy(update={"output_obj": "10.5"})) for each in (item, strict)]
    assert item.expected_output_obj == "10.45" and scores == [1.0, 0.0]


@pytest.mark.envs
def test_rows_are_json():
    for item in load(task="calendar_arithmetic", size=3):
        json.dumps(item.full_dataset_entry, default=str)


@pytest.mark.envs
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "basic_aritmetic"}, "'basic_arithmetic'"),
        ({"task": "chain_sum", "options": {"max_trms": 2}}, "max_trms"),
        ({"task": "chain_sum", "options": {"min_terms": 0}}, "min_terms"),
    ],
)
def test_a_wrong_task_or_option_is_named(options, told):
    with pytest.raises(ConfigError, match=told):
        load(**options)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ComponentError, match=r"jaxft\[envs\]"):
        load(task="chain_sum", size=2)

"""Questions in the form of bfcl are asked, and calls are judged by bfcl-eval's own checker, from its wheel.

`BFCL` names the wheel for the tests that are marked envs.
"""

import asyncio
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxft.environments import BFCLDatasetConfig, BFCLScoreConfig, BFCLWorkflowConfig
from jaxft.environments.bfcl import dataset, load_checker, score, workflow
from jaxft.errors import ComponentError, ConfigError, DatasetError
from jaxft.rollout.calls import Completion, Reply
from jaxft.rollout.messages import ToolCall

WHEEL = Path(os.environ.get("BFCL", "bfcl_eval.whl"))

SPEED = {
    "name": "physics.speed",
    "description": "Speed of a body.",
    "parameters": {
        "type": "dict",
        "properties": {
            "metres": {"type": "float", "description": "Way."},
            "seconds": {"type": "integer", "description": "Time."},
            "stops": {"type": "tuple", "items": {"type": "dict"}, "description": "Stops."},
            "unit": {"type": "any", "description": "Unit."},
        },
        "required": ["metres", "seconds"],
    },
}


def question(number, category, text="How fast?"):
    return {"id": f"{category}_{number}", "question": [[{"role": "user", "content": text}]], "function": [SPEED]}


ROWS = {
    "BFCL_v4_simple_python.json": [question(0, "simple_python"), question(1, "simple_python")],
    "possible_answer/BFCL_v4_simple_python.json": [
        {
            "id": f"simple_python_{n}",
            "ground_truth": [{"physics.speed": {"metres": [9.0], "seconds": [3], "unit": ["", "m/s"]}}],
        }
        for n in range(2)
    ],
    "BFCL_v4_parallel.json": [question(0, "parallel")],
    "possible_answer/BFCL_v4_parallel.json": [
        {"id": "parallel_0", "ground_truth": [{"physics.speed": {"metres": [n], "seconds": [1]}} for n in (1, 2)]}
    ],
    "BFCL_v4_irrelevance.json": [question(0, "irrelevance", "Who wrote Faust?")],
    "BFCL_v4_live_relevance.json": [question(0, "live_relevance")],
}


def texts():
    return {f"bfcl_eval/data/{name}": "".join(json.dumps(row) + "\n" for row in rows) for name, rows in ROWS.items()}


@pytest.fixture
def folder(tmp_path):
    for name, text in texts().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def load(path, *categories):
    return asyncio.run(anext(dataset(BFCLDatasetConfig(path=path, categories=categories), None)))


def test_functions_are_tools_in_the_types_of_json_schema(folder):
    items = load(folder, "simple_python", "irrelevance")
    assert [item.id for item in items] == ["simple_python_0", "simple_python_1", "irrelevance_0"]
    (tool,) = items[0].full_dataset_entry["tools"]
    assert tool["type"] == "function" and tool["function"]["name"] == "physics_speed"
    schema = tool["function"]["parameters"]
    found = {name: value["type"] for name, value in schema["properties"].items()}
    assert schema["type"] == "object"
    assert found == {"metres": "number", "seconds": "integer", "stops": "array", "unit": "string"}
    assert schema["properties"]["stops"]["items"] == {"type": "object"}
    assert items[0].full_dataset_entry["function"] == [SPEED] and items[2].full_dataset_entry["ground_truth"] is None


def test_a_wheel_is_read_as_a_folder_is(folder, tmp_path):
    with zipfile.ZipFile(tmp_path / "bfcl_eval.whl", "w") as wheel:
        for name, text in texts().items():
            wheel.writestr(name, text)
    assert load(tmp_path / "bfcl_eval.whl", "parallel") == load(folder, "parallel")


def test_the_workflow_returns_the_calls(folder):
    (item,) = load(folder, "parallel")
    asked = {}

    async def chat(messages, *, tools, max_tokens):
        asked.update(messages=messages, tools=tools)
        calls = tuple(ToolCall(f"c{n}", "physics_speed", f'{{"metres": {n}}}') for n in (1, 2))
        return Reply("", Completion(finish_reason="tool_calls"), tool_calls=calls)

    async def main():
        async def get_llm(name):
            return SimpleNamespace(chat=chat)

        ask = await anext(workflow(BFCLWorkflowConfig(llm="policy"), SimpleNamespace(get_llm=get_llm)))
        return await ask(item.full_dataset_entry)

    assert asyncio.run(main()) == [{"physics_speed": '{"metres": 1}'}, {"physics_speed": '{"metres": 2}'}]
    assert asked["messages"] == [{"role": "user", "content": "How fast?"}]
    assert asked["tools"] == item.full_dataset_entry["tools"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: (data / "BFCL_v4_parallel.json").unlink(), r"BFCL_v4_parallel\.json"),
        (lambda data: (data / "BFCL_v4_parallel.json").write_text("{"), "parallel cannot be read"),
        (lambda data: (data / "BFCL_v4_parallel.json").write_text('{"id": "parallel_0"}'), "function"),
        (lambda data: (data / "possible_answer" / "BFCL_v4_parallel.json").write_text(""), "parallel_0"),
    ],
)
def test_data_that_cannot_be_read_are_named(folder, change, told):
    change(folder / "bfcl_eval" / "data")
    with pytest.raises(DatasetError, match=told):
        load(folder, "parallel")


def test_a_file_that_is_no_wheel_is_named(tmp_path):
    (tmp_path / "bfcl.whl").write_text("no archive")
    with pytest.raises(DatasetError, match=r"bfcl\.whl.*pip download"):
        load(tmp_path / "bfcl.whl", "parallel")


@pytest.mark.parametrize("category", ["multi_turn_base", "memory_kv", "simple_java", "simple"])
def test_other_categories_are_refused(folder, category):
    with pytest.raises(ConfigError, match=rf"'{category}'.*one turn.*parallel_multiple"):
        load(folder, category)


def test_a_folder_without_the_checker_is_named(tmp_path):
    with pytest.raises(ComponentError, match=f"{tmp_path}.*bfcl_eval"):
        asyncio.run(anext(score(BFCLScoreConfig(path=tmp_path), None)))


def test_each_path_has_its_own_checker(tmp_path):
    for version in ("old", "new"):
        module = tmp_path / version / "bfcl_eval" / "eval_checker" / "ast_eval" / "ast_checker.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING\nversion = '{version}'\n")
    before = list(sys.path)
    assert [load_checker(tmp_path / version).version for version in ("old", "new")] == ["old", "new"]
    assert sys.path == before and not any(name.startswith("bfcl_eval") for name in sys.modules)
    with pytest.raises(ComponentError, match="third"):
        load_checker(tmp_path / "third")


RIGHT = {"physics_speed": '{"metres": 9, "seconds": 3}'}
ONE, TWO = ({"physics_speed": f'{{"metres": {n}.0, "seconds": 1}}'} for n in (1, 2))


@pytest.mark.envs
@pytest.mark.parametrize(
    ("category", "calls", "reward"),
    [
        ("simple_python", [RIGHT], 1.0),
        ("simple_python", [], 0.0),
        ("simple_python", [RIGHT, RIGHT], 0.0),
        ("simple_python", [{"physics_speed": '{"metres": 9, "seconds": "3"}'}], 0.0),
        ("simple_python", [{"physics_speed": '{"metres": 9'}], 0.0),
        ("simple_python", [{"physics_speed": "9"}], 0.0),
        ("simple_python", [{"physics_speed": '[["metres", 9], ["seconds", 3]]'}], 0.0),
        ("live_relevance", [{"physics_speed": "[]"}], 0.0),
        ("parallel", [TWO, ONE], 1.0),
        ("parallel", [ONE, ONE], 0.0),
        ("irrelevance", [], 1.0),
        ("irrelevance", [RIGHT], 0.0),
        ("live_relevance", [RIGHT], 1.0),
        ("live_relevance", [], 0.0),
    ],
)
def test_the_checker_of_the_wheel_scores(folder, category, calls, reward):
    evaluate = asyncio.run(anext(score(BFCLScoreConfig(path=WHEEL), None)))
    scored = evaluate(load(folder, category)[0].model_copy(update={"output_obj": calls}))
    assert scored.score == reward and (reward or "relevance" in category or scored.reasoning["error"])


@pytest.mark.envs
def test_all_questions_of_the_wheel_are_read_and_none_is_right_by_silence():
    evaluate = asyncio.run(anext(score(BFCLScoreConfig(path=WHEEL), None)))
    categories = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
    live = (
        "live_simple",
        "live_multiple",
        "live_parallel",
        "live_parallel_multiple",
        "live_irrelevance",
        "live_relevance",
    )
    items = load(WHEEL, *categories, *live)
    silent = {item.id for item in items if evaluate(item.model_copy(update={"output_obj": []})).score}
    assert len(items) == 3491 and silent == {item.id for item in items if "irrelevance" in item.id}

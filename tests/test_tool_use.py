"""The questions of experiments/tool_use, and what its agents send: the same calls, in any framework and any order."""

import asyncio
import io
import json
import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import jaxft

FOLDER = Path(__file__).parents[1] / "experiments" / "tool_use"
OPTIONS = Namespace(overwrite=False, resume=False, warm_start_steps=500, eval_questions=8)


@pytest.fixture(scope="module")
def data():
    sys.path.insert(0, str(FOLDER))
    import data

    yield data
    sys.path.remove(str(FOLDER))


def test_no_fact_of_a_held_out_row_is_in_a_training_row(data):
    facts = {
        split: {fact for item in data.examples(split, 1000) for fact in item.full_dataset_entry["facts"].items()}
        for split in ("train", "held_out")
    }
    assert len(facts["train"]) == 4 * 26 and len(facts["held_out"]) == 2 * 26
    assert facts["train"].isdisjoint(facts["held_out"])


def test_answers_follow_from_the_facts(data):
    for item in data.examples("train", 200):
        row = item.full_dataset_entry
        operation, first, second = row["question"].split()
        a, b = row["facts"][first], row["facts"][second]
        assert int(row["answer"]) == {"add": a + b, "sub": a - b, "max": max(a, b)}[operation]
        assert a != b and len(row["facts"]) == 4


def test_careless_conversations_have_the_form_of_an_episode_and_are_mostly_wrong(data):
    draw, right = random.Random(0), 0
    rows = [item.full_dataset_entry for item in data.examples("train", 1000)]
    for row in rows:
        question, *turns, answer = data.careless_conversation(row, draw)
        assert question == {"role": "user", "content": row["question"]} and len(turns) == 4
        for call, result in zip(turns[::2], turns[1::2], strict=True):
            (function,) = [each["function"] for each in call["tool_calls"]]
            assert function["name"] == data.TOOL["function"]["name"]
            assert function["arguments"]["key"] in row["question"].split()[1:]
            assert int(result["content"]) == row["facts"][function["arguments"]["key"]]
        right += answer["content"] == row["answer"]
    assert 0.2 < right / len(rows) < 0.4


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Trains an agent for one epoch after a short warm start, and returns its folder."""

    def run(agent, name, **changes):
        monkeypatch.setenv("AGENT", agent)
        changes |= {
            "finetuning.num_epochs": 1,
            "finetuning.output_dir": str(tmp_path / name),
            "trainers.loop.examples_per_update": 4,
            "trainers.loop.save_episodes": "all",
            "trainer_adapters.local.num_iterations": 1,
            # A gradient, even where every answer of so short a warm start is wrong.
            "trainer_adapters.local.loss.entropy_coef": 0.01,
        }
        overrides = [(path, json.dumps(value)) for path, value in changes.items()]
        config = jaxft.load_config(FOLDER / "tool_use.yml", overrides)
        monkeypatch.setattr("sys.stdout", io.StringIO())
        asyncio.run(sys.modules["tool_use"].main(config, OPTIONS))
        return tmp_path / name

    yield run
    sys.path[:] = [path for path in sys.path if path not in (str(FOLDER), str(FOLDER.parent))]


def outcome(folder):
    """Metrics, episodes and model of a run, as bytes, and the metrics of its epoch."""
    files = ["training_metrics.jsonl", "trajectories/samples.jsonl", "model/model.safetensors"]
    metrics = json.loads((folder / files[0]).read_text())
    return [(folder / file).read_bytes() for file in files], metrics


@pytest.mark.long
def test_any_number_of_agents_at_once_gives_the_same_bytes(run):
    first, metrics = outcome(run("openai", "at_once", **{"eval.general.max_concurrency": 64}))
    assert metrics["tool_calls"] > 0 and metrics["sequences_per_trajectory"] == 1.0
    one_by_one, _ = outcome(run("openai", "one_by_one", **{"eval.general.max_concurrency": 1}))
    assert one_by_one == first

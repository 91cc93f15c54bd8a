"""`jaxft eval` of a run's model, alone and against another one."""

import json
from statistics import fmean, stdev

import jax
import numpy as np
import pytest
from scipy import stats

from jaxft.cli import main
from jaxft.components.model_source import BASE
from jaxft.harness.evaluation_scores import paired_difference
from jaxft.harness.registry import EvaluatorConfig, WorkflowConfig, register_evaluator, register_workflow
from jaxft.models.hf import save_model
from jaxft.models.load import init_model

QUESTIONS = ("one", "two", "three", "four")


class LetterAgentConfig(WorkflowConfig, name="letter_agent"):
    pass


@register_workflow(config_type=LetterAgentConfig)
async def letter_agent(config, builder):
    llm = await builder.get_llm("policy")

    async def answer(row):
        return (await llm.chat([{"role": "user", "content": row["question"]}], max_tokens=2)).content

    yield answer


class LetterSumConfig(EvaluatorConfig, name="letter_sum"):
    pass


@register_evaluator(config_type=LetterSumConfig)
async def letter_sum(config, builder):
    yield lambda item: sum(item.output_obj.encode()) % 10 / 10


@pytest.fixture(scope="module")
def models(tmp_path_factory, tokenizer):
    folders = [tmp_path_factory.mktemp("models") / name for name in ("start", "trained")]
    for seed, folder in enumerate(folders):
        model, params = init_model("qwen3-50k", jax.random.key(seed))
        save_model(folder, model, params, tokenizer=tokenizer)
    return folders


@pytest.fixture
def run(tmp_path, models, monkeypatch):
    """A run directory with a configuration and a model that differs from the one that it began with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(models[1])
    for name, questions in (("train", "x"), ("held_out", QUESTIONS)):
        rows = [json.dumps({"question": question, "answer": "", "id": question}) for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    datasets = [{"_type": "jsonl", "file_path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "held_out")]
    sections = {
        "llms": {"policy": {"_type": "local_policy", "path": str(models[0]), "max_context_tokens": 96}},
        "workflow": {"_type": "letter_agent"},
        "eval": {
            "general": {"dataset": datasets[0]},
            "validation": {"dataset": datasets[1]},
            "evaluators": {"sum": {"_type": "letter_sum"}},
        },
        "trainer_adapters": {"local": {"_type": "local_trainer_adapter", "llm": "policy"}},
        "finetuning": {"trainer_adapter": "local", "reward_function": {"name": "sum"}},
    }
    (tmp_path / "run" / "config.yml").write_text(json.dumps(sections))
    return "run"


def test_the_model_of_a_run_is_compared_with_the_one_that_it_began_with(run, tmp_path, capsys):
    def rewards(name, *arguments):
        options = ["--num-generations", "2", "--temperature", "own", "-o", "eval.general.output_dir", name]
        assert main(["eval", *arguments, *options]) == 0, capsys.readouterr().err
        output = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert [item["id"] for item in output["eval_input"]["eval_input_items"]] == [q for q in QUESTIONS for _ in "ab"]
        return output["rewards"], json.loads((tmp_path / name / "result.json").read_text())

    changed = ["--set", "trainer_adapters.local.loss.function=tests.own_functions:pull@000000000000"]
    trained, result = rewards("a", run, "--against", BASE, *changed)
    shown = capsys.readouterr().out
    before, _ = rewards("b", "--config-file", "run/config.yml", "--dataset", "held_out.jsonl")
    assert trained != before
    assert result["average_reward"] == pytest.approx(fmean(trained))
    assert result["against/average_reward"] == pytest.approx(fmean(before))
    assert result["difference"] == pytest.approx(fmean(trained) - fmean(before))
    assert result["difference_num_examples"] == 4 and result["against/best@2"] >= result["against/best@1"]
    assert f"base: reward {result['difference']:+.4g}, 95 % interval [{result['difference_low']:.4g}, " in shown
    _, same = rewards("c", run, "--against", "run/model")
    assert (same["difference"], same["difference_low"], same["difference_num_higher"]) == (0.0, 0.0, 0)
    assert "the model is not shown to differ from run/model" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(run, tmp_path, capsys):
    for arguments, message in (
        ([run, "--against", "nowhere"], "nowhere: holds no model"),
        ([run, "--against", BASE, "--set", "finetuning.reward_function=null"], "finetuning.reward_function: is null"),
        (["none", "--against", BASE], "none/config.yml"),
        (["train.jsonl"], "train.jsonl/config.yml"),
    ):
        assert main(["eval", *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "run" / "environment.json").write_text('{"masked": ["workflow.api_key"]}')
    assert main(["eval", run]) == 2 and "workflow.api_key: holds a secret" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", run, "--config-file", "run/config.yml"])


def test_a_paired_difference_is_students_interval_of_the_examples_differences():
    draw = np.random.default_rng(0)
    first, second = draw.normal(0.3, 1.0, (7, 3)), draw.normal(0.0, 1.0, (7, 3))
    examples = [str(number) for number in range(7) for _ in range(3)]
    found = paired_difference(examples, first.ravel().tolist(), second.ravel().tolist())
    differences = (first - second).mean(axis=1)
    wanted = stats.ttest_rel(first.mean(axis=1), second.mean(axis=1)).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.mean == pytest.approx(differences.mean()) and stdev(differences) > 0
    assert (found.num_higher, found.num_lower) == ((differences > 0).sum(), (differences < 0).sum())


def test_pairs_without_both_rewards_are_left_out():
    assert paired_difference(["a", "a", "b"], [1.0, None, None], [0.0, 1.0, 1.0]) == (1.0, None, None, 1, 1, 0)
    assert paired_difference(["a"], [None], [1.0]) is None

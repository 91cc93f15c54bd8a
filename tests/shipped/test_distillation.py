"""On-policy distillation: runs of a tiny student with a teacher of other weights, and teachers that do not fit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxft
from jaxft.cli import main
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.config import model_preset
from jaxft.models.hf import save_model
from jaxft.models.load import init_model
from jaxft.training.batch import BatchPlanner, compute_advantages, make_batch
from jaxft.training.config import LossConfig

EXAMPLES = 2


class StudentConfig(jaxft.WorkflowConfig, name="distilled_student"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=StudentConfig)
async def distilled_student(config: StudentConfig, builder: Any) -> Any:
    llm = await builder.get_llm(config.llm)

    async def answer(example: dict) -> str:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=6)
        return reply.content

    yield answer


class NothingConfig(jaxft.EvaluatorConfig, name="no_reward"):
    pass


@jaxft.register_evaluator(config_type=NothingConfig)
async def no_reward(config: NothingConfig, builder: Any) -> Any:
    """The same reward for all, from which nothing can be learned."""
    yield lambda item: 1.0


class QuestionsConfig(jaxft.DatasetConfig, name="distilled_questions"):
    pass


@jaxft.register_dataset_loader(config_type=QuestionsConfig)
async def distilled_questions(config: QuestionsConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=str(i), full_dataset_entry={"question": str(i)}) for i in range(EXAMPLES)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer):
    """A checkpoint of another seed."""
    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(7, impl="threefry2x32"))
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save_model(folder, model, jax.tree.map(lambda leaf: 3 * leaf, params), tokenizer=tokenizer)
    return folder


@pytest.fixture
def finetune(tmp_path, teacher, capsys):
    """Runs `jaxft finetune` with a loss; returns status, output and the rows of the metrics."""

    def run(name: str, loss: dict, *options: str, **changes: Any) -> tuple[int, str, list[dict]]:
        config = {
            "imports": [str(Path(__file__))],
            "llms": {
                "policy": {"_type": "local_policy", "preset": "qwen3-50k", "max_context_tokens": 32, "slots": 8},
                "teacher": {"_type": "local_policy", "path": str(teacher), "max_context_tokens": 32, "slots": 1},
            },
            "workflow": {"_type": "distilled_student", "llm": "policy"},
            "eval": {
                "general": {"dataset": {"_type": "distilled_questions"}},
                "evaluators": {"nothing": {"_type": "no_reward"}},
            },
            "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
            "trainer_adapters": {
                "local": {
                    "_type": "local_trainer_adapter",
                    "llm": "policy",
                    "loss": {"name": "dapo", **loss},
                    "optimizer": {"learning_rate": 1e-2},
                    "microbatch_tokens": 128,
                }
            },
            "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 0}},
            "finetuning": {
                "enabled": True,
                "trainer": "loop",
                "trajectory_builder": "rollouts",
                "trainer_adapter": "local",
                "reward_function": {"name": "nothing"},
                "num_epochs": 10,
                "output_dir": str(tmp_path / name),
            },
        }
        (tmp_path / "run.yml").write_text(dump_yaml(config))
        sets = [word for path, value in changes.items() for word in ("--set", f"{path.replace('__', '.')}={value}")]
        options = options or ("--overwrite",)
        status = main(["finetune", "--config_file", str(tmp_path / "run.yml"), *options, *sets])
        file = tmp_path / name / "training_metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        said = capsys.readouterr()
        return status, said.out + said.err, rows

    return run


@pytest.mark.parametrize("form", ["sampled_token", "forward"])
def test_a_student_learns_from_its_teacher_alone(finetune, form):
    """The rewards are all equal; whatever is learned is the teacher's."""
    status, said, rows = finetune("run", {"distillation": {"teacher": "teacher", "form": form}})
    assert status == 0, said
    distances = [row["teacher_divergence"] for row in rows]
    assert all(row["applied_updates"] == 1 and row["no_signal_groups"] == EXAMPLES for row in rows)
    assert np.mean(distances[-3:]) < 0.9 * distances[0]


def test_a_resumed_run_goes_on_with_its_teacher(finetune):
    loss = {"distillation": {"teacher": "teacher", "form": "reverse"}}
    status, said, whole = finetune("whole", loss, "--strict-compile", finetuning__num_epochs=3)
    assert status == 0, said  # nothing is compiled after the start
    finetune("parts", loss, finetuning__num_epochs=2)
    status, _, rows = finetune("parts", loss, "--resume", finetuning__num_epochs=3)
    assert status == 0 and rows == whole


def test_without_a_teacher_equal_rewards_teach_nothing(finetune):
    status, said, rows = finetune("run", {}, finetuning__num_epochs=2)
    assert status != 0 and "the rewards of every group are equal" in said
    assert all(row["applied_updates"] == 0 and "teacher_divergence" not in row for row in rows)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss__distillation__teacher": "policy"}, "cannot teach itself"),
        ({"teacher__max_context_tokens": 16}, "its max_context_tokens is 16, and the policy's 32"),
        ({"teacher": "{_type: local_policy, snapshot_of: policy}"}, "a snapshot changes while it teaches"),
        (
            {"teacher": "{_type: openai, model: x, api_key: x, base_url: 'http://localhost:1'}"},
            "gives no probabilities",
        ),
        ({"loss__name": "ppo"}, "ppo has no distillation"),
        ({"loss__distillation__teacher": "techer"}, "techer"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(finetune, changes, expected):
    where = {"loss": "trainer_adapters__local__loss", "teacher": "llms__teacher"}
    paths = {where[path.split("__")[0]] + path[len(path.split("__")[0]) :]: value for path, value in changes.items()}
    status, said, rows = finetune("run", {"distillation": {"teacher": "teacher"}}, **paths)
    assert status == 2 and expected in said and not rows


def test_a_teacher_with_another_tokenizer_is_refused(finetune, tmp_path, tokenizer):
    folder = tmp_path / "other"
    model, params = init_model(model_preset("qwen3-50k", vocab_size=263), jax.random.key(7, impl="threefry2x32"))
    import copy

    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<strange>"])
    save_model(folder, model, params, tokenizer=other)
    status, said, _ = finetune("run", {"distillation": {"teacher": "teacher"}}, llms__teacher__path=folder)
    assert status == 2 and "its tokenizer is another than the policy's: 1 tokens" in said and "'<strange>'" in said


def test_what_the_teacher_thinks_is_added_to_the_advantages(make_group, collect):
    """`reward_coef A + coef (log teacher - log student)` on trained tokens, and zero elsewhere."""
    rows, credit = collect([make_group(1.0, 0.0)])
    loss = LossConfig(name="dapo", distillation={"teacher": "t", "coef": 2.0, "reward_coef": 0.5})
    job = make_batch(rows, BatchPlanner(64))
    by_teacher = np.where(job.batch.tokens >= 0, -0.75, 0.0).astype(np.float32)
    plain, _ = compute_advantages(job, credit, LossConfig(name="dapo"))
    mixed, metrics = compute_advantages(job._replace(teacher_logprobs=by_teacher), credit, loss)
    mask = np.asarray(job.batch.completion_mask)
    gain = np.where(mask, by_teacher - job.batch.sampler_logprobs, 0.0)
    expected = np.where(mask, 0.5 * plain.batch.advantages + 2.0 * gain, 0.0)
    np.testing.assert_allclose(np.where(mask, mixed.batch.advantages, 0.0), expected, rtol=1e-6)
    assert metrics["teacher_divergence"] == pytest.approx(-gain[mask].mean(), rel=1e-6)


@pytest.fixture
def make_group(make_sequence):
    from jaxft.harness.data_models import Trajectory

    def make(*rewards):
        return [
            Trajectory(episode=[], reward=reward, generation=place, sequences=[make_sequence(place)])
            for place, reward in enumerate(rewards)
        ]

    return make


@pytest.fixture
def collect():
    from jaxft.training.batch import Row
    from jaxft.training.rows import collect_rewards

    def make(groups):
        members = [trajectory for group in groups for trajectory in group]
        rows = [Row(sequence, number) for number, each in enumerate(members) for sequence in each.sequences]
        return rows, partial(collect_rewards, groups)(LossConfig(name="dapo"))

    return make

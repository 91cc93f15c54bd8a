"""On-policy distillation: a run of a tiny student with a teacher of other weights, and teachers that do not fit."""

import asyncio
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.cli import main
from jaxft.components.configs import LocalTrainerAdapterConfig
from jaxft.components.frozen_weights import load_teacher
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.errors import ComponentError
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.config import model_preset
from jaxft.models.hf import save_model
from jaxft.models.load import init_model
from jaxft.rollout.client import ChatClient
from jaxft.rollout.policy import Policy
from jaxft.rollout.remote import RemoteClient
from jaxft.rollout.weights import Weights
from jaxft.training.advantages import collect_rewards, compute_advantages
from jaxft.training.batch import BatchPlanner, make_batch
from jaxft.training.config import DistillationConfig, LossConfig

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
    reason: str | None = None


@jaxft.register_evaluator(config_type=NothingConfig)
async def no_reward(config: NothingConfig, builder: Any) -> Any:
    """The same reward for all, from which nothing can be learned."""
    yield lambda item: jaxft.EvalOutputItem(id=item.id, score=1.0, reasoning=config.reason)


class QuestionsConfig(jaxft.DatasetConfig, name="distilled_questions"):
    pass


@jaxft.register_dataset_loader(config_type=QuestionsConfig)
async def distilled_questions(config: QuestionsConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=str(i), full_dataset_entry={"question": str(i)}) for i in range(EXAMPLES)]


@pytest.fixture(scope="module")
def teacher_params():
    """Weights of another seed, of three times the size."""
    _, params = init_model(model_preset("qwen3-50k"), jax.random.key(7, impl="threefry2x32"))
    return jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, policy, teacher_params, tokenizer):
    """Their checkpoint."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    save_model(folder, policy.model, teacher_params, tokenizer=tokenizer)
    return folder


def finetune(folder, teacher, *options, loss=None, **changes):
    """Run `jaxft finetune`, and return status and rows of metrics; `changes` maps dotted paths to values."""
    loss = {"name": "dapo", "distillation": {"teacher": "teacher", "form": "sampled_token"}} | (loss or {})
    config = {
        "imports": [str(Path(__file__))],
        "llms": {
            "policy": {"_type": "local_policy", "preset": "qwen3-50k", "max_context_tokens": 48, "slots": 8},
            "teacher": {"_type": "local_policy", "path": str(teacher), "max_context_tokens": 48, "slots": 1},
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
                "loss": loss,
                "optimizer": {"learning_rate": 1e-2},
                "microbatch_tokens": 48,
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
            "output_dir": str(folder),
        },
    }
    file = folder.parent / "run.yml"
    file.write_text(dump_yaml(config))
    sets = [word for path, value in changes.items() for word in ("--set", f"{path.replace('__', '.')}={value}")]
    status = main(["finetune", "--config-file", str(file), *options, *sets])
    metrics = folder / "training_metrics.jsonl"
    return status, [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


@pytest.fixture(scope="module")
def distilled(tmp_path_factory, teacher):
    """Status and metrics of a run."""
    return finetune(tmp_path_factory.mktemp("distilled") / "run", teacher)


def test_a_student_learns_from_its_teacher_alone(distilled):
    """The rewards are all equal; whatever is learned is the teacher's."""
    status, rows = distilled
    distances = [row["teacher_divergence"] for row in rows]
    assert status == 0 and len(rows) == 10
    assert all(row["applied_updates"] == 1 and row["reward_min"] == row["reward_max"] == 1.0 for row in rows)
    assert all(row["no_signal_groups"] == 0 for row in rows)  # the advantages are the teacher's
    assert np.mean(distances[-3:]) < 0.9 * distances[0], distances


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_teacher(distilled, tmp_path, teacher):
    """Nor does it compile anything after its start."""
    finetune(tmp_path / "run", teacher, finetuning__num_epochs=1)
    status, rows = finetune(tmp_path / "run", teacher, "--resume", "--strict-compile", finetuning__num_epochs=3)
    assert status == 0 and rows == distilled[1][:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "form"), [("self", "reverse"), ("reference", "sampled_token"), ("reference", "reverse")]
)
def test_a_policy_that_is_told_why_teaches_itself(tmp_path, teacher, by, form):
    """A resumed run goes on with the moving average, and no job compiles anything."""
    follows = {"reference": {"update_every": 1, "mixing": 0.5}} if by == "reference" else {}
    told = {"feedback_template": " ({feedback})", "solution_template": ""}
    loss = {"distillation": {"teacher": by, "form": form, **told}} | follows
    options = {"loss": loss, "eval__evaluators__nothing__reason": "too long"}
    status, whole = finetune(tmp_path / "whole", teacher, "--strict-compile", **options, finetuning__num_epochs=3)
    assert status == 0 and [row["taught_fraction"] for row in whole] == [1.0] * 3
    assert all(row["applied_updates"] == 1 and row["teacher_divergence"] > 0 for row in whole)
    finetune(tmp_path / "run", teacher, **options, finetuning__num_epochs=1)
    status, rows = finetune(tmp_path / "run", teacher, "--resume", **options, finetuning__num_epochs=3)
    assert status == 0 and rows == whole


def test_a_language_model_named_like_a_teacher_is_refused():
    with pytest.raises(ValueError, match="'self' is the policy itself"):
        DistillationConfig.model_validate({"teacher": "self"}, context={"llms": {"self": {}}})


@pytest.fixture(scope="module")
def taught(foreign_trajectories, make_policy, policy, teacher_params, make_collection):
    """Metrics of four jobs with a teacher of the whole vocabulary, and its parameters after them."""
    loss = {"name": "dapo", "distillation": {"teacher": "teacher", "form": "forward"}}
    rate = {"learning_rate": 1e-2}
    config = LocalTrainerAdapterConfig(llm="policy", loss=loss, optimizer=rate, microbatch_tokens=64)
    teacher = Weights(policy.model, jax.tree.map(jnp.asarray, teacher_params))
    adapter = LocalTrainerAdapter(config, make_policy(), weights={"teacher": teacher})

    async def main():
        refs = [await adapter.submit(make_collection(f"job {number}", rewards=(1.0,) * 4)) for number in range(4)]
        return [(await adapter.wait_until_complete(ref)).metadata["metrics"] for ref in refs]

    return asyncio.run(main()), teacher.params


def test_a_teacher_of_the_whole_vocabulary_teaches_rows_of_equal_rewards(taught, teacher_params):
    metrics, params = taught
    assert [each["applied_updates"] for each in metrics] == [1.0] * 4
    assert not any("no_signal_groups" in each for each in metrics)
    distances = [each["teacher_divergence"] for each in metrics]
    assert distances == sorted(distances, reverse=True) and distances[-1] < 0.9 * distances[0], distances
    jax.tree.map(np.testing.assert_array_equal, params, teacher_params)


class Models:
    """A builder of language models that are there already."""

    def __init__(self, **llms):
        self.llms = llms

    async def get_llm(self, name):
        return self.llms[name]


def test_teachers_that_do_not_fit_are_refused(policy, make_policy, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<strange>"])
    params = asyncio.run(policy.read(lambda params: jax.tree.map(lambda leaf: leaf.copy(), params)))
    strange = Policy(policy.model, params, other, stop_ids=(), slots=1, max_context_tokens=96)
    student = make_policy()
    old = student.add_snapshot("old", every=1, seed=0, slots=8, max_context_tokens=96)
    remote = RemoteClient("x", "remote", base_url="http://localhost:1", api_key="x", max_retries=0, timeout_seconds=1.0)
    cases = {
        "cannot teach itself": ChatClient(student),
        "a snapshot changes while it teaches": ChatClient(old),
        "gives no probabilities": remote,
        "its max_context_tokens is 16, and the policy's 96": ChatClient(make_policy(max_context_tokens=16)),
        "its tokenizer is another than the policy's: 1 tokens .*'<strange>'": ChatClient(strange),
    }
    for said, llm in cases.items():
        with pytest.raises(ComponentError, match=rf"llms\.one cannot teach: .*{said}"):
            asyncio.run(load_teacher("one", student, Models(one=llm)))
    found = asyncio.run(load_teacher("one", student, Models(one=ChatClient(policy))))
    assert found.model is policy.model and jax.tree.structure(found.params) == jax.tree.structure(params)
    strange.close()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        *[({"name": name}, f"{name} has no distillation") for name in ("ppo", "dpo", "sft")],
        ({"distillation": {"teacher": "techer"}}, "techer"),
        ({"distillation": {"teacher": "self", "feedback_template": "", "solution_template": ""}}, "nothing to teach"),
        ({"distillation": {"teacher": "self", "feedback_template": "no"}}, "{feedback}"),
        ({"distillation": {"teacher": "self"}, "reference": {"mixing": 0.1}}, "or a teacher"),
        ({"distillation": {"teacher": "reference"}, "reference": {"mixing": 1.1}}, "mixing"),
    ],
)
def test_losses_that_nobody_can_teach_are_refused(tmp_path, teacher, capsys, loss, said):
    status, rows = finetune(tmp_path / "run", teacher, loss=loss)
    assert status == 2 and said in capsys.readouterr().err and not rows


def test_what_the_teacher_thinks_is_added_to_the_advantages(make_group, collect):
    """`reward_coef A + (log teacher - log student)` on trained tokens, and zero elsewhere."""
    rows, credit = collect([make_group(1.0, 0.0)])
    loss = LossConfig(name="dapo", distillation={"teacher": "t", "reward_coef": 0.5})
    job = make_batch(rows, BatchPlanner(64))
    by_teacher = np.where(job.batch.tokens >= 0, -0.75, 0.0).astype(np.float32)
    plain, _ = compute_advantages(job, credit, LossConfig(name="dapo"))
    mixed, metrics = compute_advantages(job._replace(teacher_logprobs=by_teacher), credit, loss)
    mask = np.asarray(job.batch.completion_mask)
    gain = np.where(mask, by_teacher - job.batch.sampler_logprobs, 0.0)
    expected = np.where(mask, 0.5 * plain.batch.advantages + gain, 0.0)
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

    def make(groups):
        members = [trajectory for group in groups for trajectory in group]
        rows = [Row(sequence, number) for number, each in enumerate(members) for sequence in each.sequences]
        return rows, partial(collect_rewards, groups)(LossConfig(name="dapo"))

    return make

"""An agent that fails now and then still learns; one that always fails ends the run with its last traceback."""

import json
from typing import Any

import pytest

import jaxft
from jaxft.cli import main
from jaxft.harness.strict_yaml import dump_yaml


class BrittleConfig(jaxft.WorkflowConfig, name="brittle_agent"):
    llm: jaxft.LLMRef
    failing_share: float = 0.3


@jaxft.register_workflow(config_type=BrittleConfig)
async def brittle_agent(config: BrittleConfig, builder: Any) -> Any:
    """Answers in a few tokens; in a share of its episodes a tool of its is down."""
    llm = await builder.get_llm(config.llm)

    async def answer(example: dict) -> tuple[int, ...]:
        reply = await llm.chat([{"role": "user", "content": example["question"]}], max_tokens=4)
        if jaxft.episode().random.random() < config.failing_share:
            raise ConnectionError("the tool is down")
        return reply.token_ids

    yield answer


class EvenConfig(jaxft.EvaluatorConfig, name="even_tokens"):
    pass


@jaxft.register_evaluator(config_type=EvenConfig)
async def even_tokens(config: EvenConfig, builder: Any) -> Any:
    yield lambda item: sum(token % 2 == 0 for token in item.output_obj) / len(item.output_obj)


@pytest.fixture
def finetune(tmp_path):
    """Runs the command on a configuration; gives its exit code."""

    def finetune(*options, **agent):
        rows = [json.dumps({"question": str(n), "answer": ""}) for n in range(8)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows))
        run = {
            "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 32, "max_context_tokens": 96}},
            "workflow": {"_type": "brittle_agent", "llm": "policy", **agent},
            "eval": {
                "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
                "evaluators": {"even": {"_type": "even_tokens"}},
            },
            "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 8}},
            "trainer_adapters": {
                "local": {
                    "_type": "local_trainer_adapter",
                    "llm": "policy",
                    "loss": {"name": "dapo"},
                    "optimizer": {"learning_rate": 2e-2},
                }
            },
            "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 0}},
            "finetuning": {
                "enabled": True,
                "trainer": "loop",
                "trajectory_builder": "rollouts",
                "trainer_adapter": "local",
                "reward_function": {"name": "even"},
                "num_epochs": 12,
                "checkpoints": {"every": None},
                "output_dir": str(tmp_path / "run"),
            },
        }
        (tmp_path / "run.yml").write_text(dump_yaml(run))
        return main(["finetune", "--config_file", str(tmp_path / "run.yml"), *options])

    return finetune


def test_an_agent_that_fails_in_a_third_of_its_episodes_learns(finetune, tmp_path, capsys):
    assert finetune() == 0
    rows = [json.loads(row) for row in (tmp_path / "run" / "training_metrics.jsonl").read_text().splitlines()]
    failed = sum(row["failed_episodes"] for row in rows) / sum(row["episodes"] for row in rows)
    assert 0.2 < failed < 0.4
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[:2]) / 2 < 0.6 and sum(rewards[-2:]) / 2 > 0.75
    assert "episodes failed and are left out; example '" in capsys.readouterr().out


def test_an_agent_that_always_fails_ends_the_run(finetune, capsys):
    assert finetune(failing_share=1.0) == 3
    error = capsys.readouterr().err
    assert "64 of 64 episodes failed; the last: example '7', generation 7: ConnectionError: the tool is down" in error
    assert 'raise ConnectionError("the tool is down")' in error


def test_a_device_that_is_too_small_ends_the_run_in_one_line(finetune, capsys):
    """No address space holds the cache: the allocation really fails."""
    assert finetune("--set", "llms.policy.slots=8", "--set", f"llms.policy.max_context_tokens={2**40}") == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "jaxft: error: the device has too little memory to sample: lower llms.<name>.slots (now 8), "
        f"stored_prompts (now 8) or max_context_tokens (now {2**40}); it said: RESOURCE_EXHAUSTED: Out of memory "
        "allocating "
    )
    assert error.count("\n") == 1

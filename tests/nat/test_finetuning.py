"""`nat finetune` with the components of jaxft: epochs, targets, failures, resume, secrets, single methods."""

import asyncio
import json
import signal

import pytest
import yaml
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages
from nat.plugins.langchain.callback_handler import LangchainProfilerHandler
from nat.runtime.loader import load_workflow

from jaxft.rollout.calls import recorded_call

pytestmark = pytest.mark.nat

ASKS_ONCE = """
import jaxft


class AsksOnceConfig(jaxft.WorkflowConfig, name="asks_once"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=AsksOnceConfig)
async def asks_once(config, builder):
    llm = await builder.get_llm(config.llm)

    async def ask(row):
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": row["question"]}]
        return (await llm.chat(messages, max_tokens=12)).content

    yield ask


class DigitsConfig(jaxft.EvaluatorConfig, name="digits"):
    pass


@jaxft.register_evaluator(config_type=DigitsConfig)
async def digits(config, builder):
    yield lambda item: sum(map(str.isdigit, item.output_obj)) / max(len(item.output_obj), 1)
"""


def lines(path):
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def native_config(folder, **finetuning):
    """The configuration of the same workflow, evaluator and parts in jaxft alone."""
    (folder / "asks_once.py").write_text(ASKS_ONCE)
    policy = {"_type": "local_policy", "preset": "qwen3-50k", "max_context_tokens": 64, "slots": 16}
    adapter = {"_type": "local_trainer_adapter", "llm": "policy", "optimizer": {"learning_rate": 3e-3}}
    parts = {"trainer": "own", "trajectory_builder": "own", "trainer_adapter": "own"}
    config = {
        "imports": ["asks_once"],
        "llms": {"policy": policy},
        "workflow": {"_type": "asks_once", "llm": "policy"},
        "eval": {
            "general": {"max_concurrency": 8, "dataset": {"_type": "json", "file_path": "train.json"}},
            "validation": {"dataset": {"_type": "json", "file_path": "held_out.json"}, "interval": 1},
            "evaluators": {"reward": {"_type": "digits"}},
        },
        "trajectory_builders": {"own": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
        "trainer_adapters": {"own": adapter},
        "trainers": {"own": {"_type": "grpo_trainer", "save_episodes": "all"}},
        "finetuning": {
            "enabled": True,
            **parts,
            "reward_function": {"name": "reward"},
            "num_epochs": 2,
            "seed": 3,
            "output_dir": "native",
            **finetuning,
        },
    }
    (folder / "native.yml").write_text(yaml.safe_dump(config))
    return folder / "native.yml"


def test_a_run_is_that_of_jaxft_alone_token_for_token(finetune, folder, run_jaxft):
    curriculum = {"enabled": True, "initial_percentile": 0.5, "min_reward_diff": 0.0}
    run_jaxft("finetune", "--config_file", native_config(folder, curriculum_learning=curriculum))
    finetune("held_out.json", trainers__own__save_episodes="all", finetuning__curriculum_learning=curriculum)
    own, toolkit = folder / "native", folder / "out/jaxft"
    for name in ("training_metrics.jsonl", "curriculum_state.json"):
        assert (own / name).read_bytes() == (toolkit / name).read_bytes()
    kept, samples = (lines(each / "trajectories/samples.jsonl") for each in (own, toolkit))
    for sample in (*kept, *samples):
        del sample["metadata"]["reasoning"]  # the toolkit's evaluator gives one
    assert kept == samples
    before, after = (json.loads((each / "validation_history.json").read_text()) for each in (own, toolkit))
    assert before == after and [row["epoch"] for row in after] == [0, 1, 2]
    assert len(samples) == 2 * 4 * 4 and all(sample["sequences"][0]["tokens"] for sample in samples)


def test_a_builder_of_the_toolkits_kind_samples_the_same_tokens(finetune, folder):
    def episodes(name):
        rows = lines(folder / "out/jaxft/trajectories/samples.jsonl")
        return sorted((row["example_id"], row["sequences"][0]["tokens"]) for row in rows if row["epoch"] == 0)

    settings = {"trainers__own__save_episodes": "all", "finetuning__num_epochs": 1}
    finetune(**settings)
    own = episodes("own")
    finetune(**settings, finetuning__trajectory_builder="user", trainers__own__overwrite=True)
    assert episodes("user") == own and len(own) == 16


def test_arts_builder_and_trainer_work_with_the_adapter(finetune, folder):
    pytest.importorskip("art")
    finetune(
        "held_out.json",
        trajectory_builders__art={"_type": "openpipe_art_traj_builder", "num_generations": 4},
        trainers__art={"_type": "openpipe_art_trainer"},
        finetuning__trajectory_builder="art",
        finetuning__trainer="art",
        finetuning__num_epochs=3,
    )
    rows = lines(folder / "out/training_metrics.jsonl")
    assert [row["num_trajectories"] for row in rows] == [16] * 3
    assert [row["epoch"] for row in json.loads((folder / "out/validation_history.json").read_text())] == [0, 1, 2]


def test_training_is_aimed_at_functions(finetune, folder):
    functions = {
        name: {"_type": "chat_completion", "llm_name": "policy", "system_prompt": name[0]}
        for name in ("planner", "writer")
    }
    finetune(
        functions=functions,
        workflow={"_type": "two_steps", "first": "planner", "second": "writer"},
        finetuning__target_functions=["planner"],
        finetuning__target_model="policy",
        trainers__own__save_episodes="all",
        finetuning__num_epochs=1,
    )
    (row,) = lines(folder / "out/training_metrics.jsonl")
    assert (row["calls"], row["untargeted_calls"]) == (32, 16)
    samples = lines(folder / "out/jaxft/trajectories/samples.jsonl")
    assert all(len(sample["sequences"]) == 1 for sample in samples)


@pytest.mark.parametrize("builder", ["own", "art"])
def test_six_epochs_with_validation_curriculum_and_targets(finetune, folder, builder):
    pytest.importorskip("art")
    agents = {
        name: {"_type": "chat_completion", "llm_name": "policy", "system_prompt": name[0]}
        for name in ("planner", "writer")
    }
    finetune(
        "held_out.json",
        functions=agents,
        workflow={"_type": "two_steps", "first": "planner", "second": "writer"},
        trajectory_builders__art={"_type": "openpipe_art_traj_builder", "num_generations": 4},
        finetuning__trajectory_builder=builder,
        finetuning__target_functions=["planner"],
        finetuning__target_model="policy",
        finetuning__curriculum_learning={"enabled": True, "expansion_interval": 2, "min_reward_diff": 0.0},
        finetuning__num_epochs=6,
    )
    rows = lines(folder / "out/training_metrics.jsonl")
    assert [row["curriculum_percentile"] for row in rows] == pytest.approx([0.3, 0.3, 0.5, 0.5, 0.7, 0.7])
    assert [row["num_trajectories"] for row in rows] == [16] * 6
    assert all(row["sampler_logprob_diff_max"] < 1e-4 for row in rows if row["applied_updates"])
    history = json.loads((folder / "out/validation_history.json").read_text())
    assert [row["epoch"] for row in history] == [*range(7)]


def test_pairs_of_a_builder_of_the_toolkits_kind_train_with_dpo(finetune, folder):
    finetune(
        trajectory_builders__pairs={"_type": "pairs_traj_builder"},
        trainer_adapters__own__loss={"name": "dpo"},
        trainers__pairs={"_type": "jaxft_dpo_trainer"},
        finetuning__trajectory_builder="pairs",
        finetuning__trainer="pairs",
    )
    first, second = lines(folder / "out/jaxft/training_metrics.jsonl")
    assert second["loss"] < first["loss"] and second["applied_updates"] == 1


def test_a_resumed_run_ends_like_one_that_was_not_interrupted(finetune, folder):
    finetune("held_out.json", finetuning__num_epochs=3)
    whole = {
        name: (folder / "out/jaxft" / name).read_bytes() for name in ("training_metrics.jsonl", "reward_history.json")
    }
    finetune("held_out.json", finetuning__num_epochs=1, finetuning__output_dir="again")
    finetune("held_out.json", finetuning__num_epochs=3, finetuning__output_dir="again", trainers__own__resume=True)
    assert {name: (folder / "again/jaxft" / name).read_bytes() for name in whole} == whole
    assert len(lines(folder / "again/training_metrics.jsonl")) == 3


def test_a_failed_episode_does_not_take_the_others_along(finetune, folder):
    finetune(eval__evaluators={"reward": {"_type": "digits", "fails_on": "2"}}, finetuning__num_epochs=1)
    (row,) = lines(folder / "out/training_metrics.jsonl")
    assert (row["failed_episodes"], row["num_trajectories"], row["applied_updates"]) == (4, 12, 1)


def test_the_command_ends_with_exit_code_1_when_a_job_fails(nat, folder, monkeypatch):
    monkeypatch.setenv("MAX_LOGPROB_DIFF", "1e-12")
    fails = nat("finetune", "--config_file", "config.yml")
    assert fails.returncode == 1 and "epoch_00000" in fails.stderr


def test_a_signal_saves_the_run_and_its_command_goes_on(start_nat, nat, folder):
    process = start_nat("finetune", "--config_file", "config.yml", "-o", "finetuning.num_epochs", "200")
    shown = next(line for line in process.stdout if line.lstrip().startswith("2/200"))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert shown and process.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    assert "-o trainers.own.resume true" in said
    done = len(lines(folder / "out/training_metrics.jsonl"))
    arguments = ("-o", "finetuning.num_epochs", str(done + 1), "-o", "trainers.own.resume", "true")
    resumed = nat("finetune", "--config_file", "config.yml", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert [row["epoch"] for row in lines(folder / "out/training_metrics.jsonl")] == [*range(done + 1)]


def test_the_command_honours_overrides_and_refuses_a_folder_that_holds_a_run(nat, folder):
    command = ("finetune", "--config_file", "config.yml", "-o", "finetuning.num_epochs", "1")
    first = nat(*command, "--dataset", "held_out.json")
    assert first.returncode == 0, first.stderr
    (row,) = lines(folder / "out/training_metrics.jsonl")
    assert row["num_groups"] == 2  # those of --dataset
    again = nat(*command)
    assert again.returncode == 1 and "trainers.own.resume true" in again.stderr + again.stdout


@pytest.mark.parametrize(
    "section", ["llms__policy", "trajectory_builders__own", "trainer_adapters__own", "trainers__own"]
)
def test_a_misspelt_field_is_refused(finetune, folder, section):
    with pytest.raises(ValueError, match="spelt_wrong"):
        finetune(**{f"{section}__spelt_wrong": 1})
    assert not (folder / "out").exists()


@pytest.mark.parametrize("loggers", [None, []])
def test_loggers_are_those_of_the_trainer(finetune, folder, loggers):
    given = {} if loggers is None else {"trainers__own__loggers": loggers}
    finetune(finetuning__num_epochs=1, **given)
    assert (folder / "out/jaxft/tensorboard").exists() == (loggers is None)


def test_a_secret_of_any_type_is_masked(finetune, folder):
    finetune(
        functions={"vault": {"_type": "vault", "code": "k7"}},
        llms__judge={"_type": "openai", "model_name": "judge", "api_key": "k8"},
        finetuning__num_epochs=1,
    )
    shown = (folder / "out/jaxft/config.yml").read_text()
    assert "vault" in shown and "k7" not in shown and "k8" not in shown


@pytest.mark.parametrize("per_input", [True, False])
def test_a_workflow_of_its_own_for_each_user(finetune, folder, per_input):
    general = {"max_concurrency": 4, "dataset": {"_type": "json", "file_path": "train.json"}}
    finetune(
        workflow={"_type": "per_user_echo", "llm": "policy"},
        eval__general={**general, "per_input_user_id": per_input},
        trainers__own__save_episodes="all",
    )
    rows = lines(folder / "out/training_metrics.jsonl")
    assert [(row["calls"], row["failed_episodes"], row["outside_calls"]) for row in rows] == [(16, 0, 0)] * 2
    samples = lines(folder / "out/jaxft/trajectories/samples.jsonl")
    assert all(f"number {each['example_id']}?" in each["episode"][0]["content"] for each in samples)


def test_the_parts_of_a_chain_are_steps(finetune, folder):
    finetune(workflow={"_type": "chain", "llm": "policy"}, trainers__own__save_episodes="all", finetuning__num_epochs=1)
    samples = lines(folder / "out/jaxft/trajectories/samples.jsonl")
    chains_are_steps = "on_chain_start" in vars(LangchainProfilerHandler)  # in the toolkit's later versions
    of_the_chain = 2 * 3 if chains_are_steps else 0  # the start and the end of the chain and of its two functions
    assert {sample["metadata"]["reasoning"] for sample in samples} == {f"{6 + of_the_chain} steps"}


def test_the_methods_of_the_trainer_work_one_by_one(folder, make_trainer):
    async def run():
        trainer, adapter = await make_trainer()
        try:
            ref = await trainer.run_epoch(0, "by_hand")
            status = await adapter.wait_until_complete(ref)
            validation = await trainer.run_validation_evaluation(0, "by_hand")
            evaluated = await trainer.trajectory_builder.run_eval()
            chosen = trainer.apply_curriculum_learning(await collected(trainer.trajectory_builder), 0)
            return status, validation, evaluated, chosen, trainer.get_curriculum_state()
        finally:
            await trainer.cleanup()

    async def collected(builder):
        await builder.start_run("again", {"epoch": 1})
        return await builder.finalize("again")

    status, validation, evaluated, chosen, state = asyncio.run(run())
    assert status.status == "completed" and status.metadata["metrics"]["applied_updates"] == 1
    assert validation["dataset_type"] == "validation" and validation["num_examples"] == 2
    ((name, verdicts),) = evaluated.evaluation_results
    assert name == "reward" and len(verdicts.eval_output_items) == 4
    (item, *_) = evaluated.eval_input.eval_input_items
    messages = parse_to_openai_messages(item.trajectory)
    assert messages[-1]["role"] == "assistant" and recorded_call(messages[-1]["logprobs"]).token_ids
    assert [len(group) for group in chosen.trajectories] == [4] * 4 and state["current_percentile"] == 0.3


def test_a_workflow_runs_without_finetuning(folder):
    async def run():
        async with (
            load_workflow(folder / "config.yml") as sessions,
            sessions.session() as session,
            session.run("number 1?") as runner,
        ):
            return await runner.result(to_type=str)

    assert isinstance(asyncio.run(run()), str)

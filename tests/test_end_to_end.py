"""A tiny agent through the real harness, the real components and a tiny model: what one part alone cannot show."""

import asyncio
import importlib.util
import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import ModelCard as HubCard

import jaxft
from jaxft.cli import main
from jaxft.components import local_adapter
from jaxft.runs.console import Console
from jaxft.runs.records import read_run

ROOT = Path(__file__).parents[1]
MAX_DIFFERENCE = 1e-5  # nats, between sampler and trainer in float32
TOO_LONG = 200  # characters of a question, and so tokens: more than the context holds


class CounterConfig(jaxft.WorkflowConfig, name="e2e_counter"):
    llm: jaxft.LLMRef
    temperature: float = 1.0


@jaxft.register_workflow(config_type=CounterConfig)
async def counter(config: CounterConfig, builder: Any) -> Any:
    """Two questions at once, then a second turn after one of them; what was sampled is the score."""
    llm = await builder.get_llm(config.llm)

    async def play(example: dict) -> float:
        def ask(content: str, earlier: tuple = ()) -> Any:
            messages = [*earlier, {"role": "user", "content": content}]
            return messages, llm.chat(messages, temperature=config.temperature, max_tokens=5)

        noise = jaxft.episode().random.randrange(10)
        asked = [ask("a" * example["length"]), ask(f"b{noise}")]
        first, second = await asyncio.gather(*(call for _, call in asked))
        said = {"role": "assistant", "content": second.content}
        _, call = ask("again", (*asked[1][0], said))
        third = await call
        return float(sum(first.token_ids) + sum(second.token_ids) + sum(third.token_ids) + noise)

    yield play


class ScoreConfig(jaxft.EvaluatorConfig, name="e2e_score"):
    pass


@jaxft.register_evaluator(config_type=ScoreConfig)
async def score(config: ScoreConfig, builder: Any) -> Any:
    yield lambda item: item.output_obj % 7


class LengthsConfig(jaxft.DatasetConfig, name="e2e_lengths"):
    lengths: tuple[int, ...] = (1, 5, 9, TOO_LONG)


@jaxft.register_dataset_loader(config_type=LengthsConfig)
async def lengths(config: LengthsConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=f"of-{length}", full_dataset_entry={"length": length}) for length in config.lengths]


def run_config(output_dir, **changes):
    """The sections of a run; `changes` maps dotted paths to values."""
    mapping = {
        "llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}},
        "workflow": {"_type": "e2e_counter", "llm": "policy"},
        "eval": {
            "general": {"max_concurrency": 64, "dataset": {"_type": "e2e_lengths"}},
            "evaluators": {"score": {"_type": "e2e_score"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 3}},
        "trainer_adapters": {
            "local": {"_type": "local_trainer_adapter", "llm": "policy", "optimizer": {"learning_rate": 1e-2}}
        },
        "trainers": {"loop": {"_type": "grpo_trainer", "show_episodes_every": 1}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "score"},
            "num_epochs": 2,
            "output_dir": str(output_dir),
        },
    }
    overrides = [(path.replace("__", "."), json.dumps(value)) for path, value in changes.items()]
    return jaxft.config_from_mapping(mapping, base_dir=output_dir.parent, overrides=overrides)


def train(config):
    """Trains, exports and gives what was shown."""
    shown = io.StringIO()

    async def main():
        async with jaxft.open_session(config, console=Console(shown)) as session:
            await session.train()
            session.write_result({"agent": "looked up"})
            await session.export_model()

    asyncio.run(main())
    return shown.getvalue()


def deterministic_files(folder):
    names = ["training_metrics.jsonl", "reward_history.json", "model/model.safetensors", "model/README.md"]
    paths = [folder / name for name in names] + sorted((folder / "trajectories").iterdir())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("end_to_end") / "first"
    return folder, train(run_config(folder))


def metrics_of(folder):
    return [json.loads(row) for row in (folder / "training_metrics.jsonl").read_text().splitlines()]


def test_sampler_and_trainer_agree_in_every_epoch(first_run):
    folder, _ = first_run
    rows = metrics_of(folder)
    assert [row["policy_version"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["sampler_logprob_diff_max"] <= MAX_DIFFERENCE
        assert row["stale_token_fraction"] == 0.0 and row["applied_updates"] == 1.0
        assert row["sequences_per_trajectory"] == 2.0 and row["episodes"] == 12


def test_kept_episodes_are_read_back_with_the_scores_of_their_tokens(first_run):
    folder = first_run[0]
    episodes = [row for row in read_run(folder).episodes() if "failure" not in row]
    assert [row["epoch"] for row in episodes] == [0, 0, 0, 1, 1, 1]
    assert read_run(folder).environment["differences"]["finetuning.num_epochs"] == {"value": 2, "default": 1}
    for row in episodes:
        lists = (row["token_texts"], row["advantages"], row["entropies"])
        for sequence, texts, advantages, entropies in zip(row["sequences"], *lists, strict=True):
            mask = sequence["completion_mask"]
            assert len(texts) == len(advantages) == len(entropies) == len(mask)
            trained = [value for value, is_trained in zip(advantages, mask, strict=True) if is_trained]
            assert len(set(trained)) == 1  # one reward, for every token
            assert min(entropies) >= 0.0 and max(entropies) > 1.0
    signs = {row["reward"]: row["advantages"][0][-1] for row in episodes if row["epoch"] == 0}
    assert signs[min(signs)] < 0 < signs[max(signs)]


def test_the_result_of_every_run_has_its_rewards(first_run):
    folder = first_run[0]
    rewards = [row["reward_mean"] for row in read_run(folder).metrics]
    result = json.loads((folder / "result.json").read_text())
    assert (
        result["agent"] == "looked up" and result["reward_first"] == rewards[0] and result["reward_last"] == rewards[-1]
    )
    assert result["reward_best"] == max(rewards)


def test_a_run_shows_itself(first_run):
    _, shown = first_run
    assert "1/2 epochs  reward" in shown and "2/2 epochs  reward" in shown
    assert "--- after 0 epochs, example of-1, reward" in shown


def test_epochs_count_from_0_in_rows_and_checkpoints_are_named_by_how_many_are_finished(first_run):
    folder, _ = first_run
    for name in ("training_metrics.jsonl", "timings.jsonl"):
        assert [json.loads(row)["epoch"] for row in (folder / name).read_text().splitlines()] == [0, 1]
    assert [row["epoch"] for row in json.loads((folder / "reward_history.json").read_text())] == [0, 1]
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["1", "2"]


def test_the_devices_of_a_run_are_written_down(first_run):
    folder, _ = first_run
    about = json.loads((folder / "environment.json").read_text())
    assert about["devices"] == ["cpu (cpu 0)"]
    assert about["chosen"] == {
        "llms.policy.dtype": "float32",
        "llms.policy.compute_dtype": "float32",
        "llms.policy.remat": "dots",
    }


@pytest.mark.slow
def test_one_episode_at_a_time_gives_the_same_bytes(first_run, tmp_path):
    train(run_config(tmp_path / "again", eval__general__max_concurrency=1))
    first, again = deterministic_files(first_run[0]), deterministic_files(tmp_path / "again")
    assert first.keys() == again.keys()
    assert [name for name in first if first[name] != again[name]] == []


@pytest.mark.slow
def test_the_exported_model_is_a_checkpoint_like_any_other(first_run, tmp_path):
    config = run_config(tmp_path / "reloaded", llms__policy__path=str(first_run[0] / "model"))

    async def main():
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            return await session.evaluate()

    output = asyncio.run(main())
    assert output.num_episodes == 4 and output.num_failed == 1 and output.average_reward is not None


def test_the_model_card_says_what_the_records_of_the_run_say(first_run, tmp_path):
    folder, _ = first_run
    card, rows = HubCard.load(folder / "model" / "README.md"), metrics_of(folder)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxft", "reinforcement-learning", "grpo"],
    }
    first, last = (f"{row['reward_mean']:.4g} (epoch {row['epoch'] + 1})" for row in rows)
    best = max(rows, key=lambda row: row["reward_mean"])["epoch"]
    for line in (
        "# qwen3-50k trained with GRPO",
        "| loss | `grpo` |",
        "| reward | `score` |",
        "| training data | `e2e_lengths` |",
        "| epochs | 2 |",
        f"| episodes | {sum(row['episodes'] for row in rows):.0f} |",
        "| updates | 2 |",
        "| seed | 0 |",
        f"| training | {first} | {(first, last)[best]} | {last} |",
        "as safetensors in float32",
    ):
        assert line in card.text, line
    assert "`reward." not in card.text  # it is a fact of the run, and no setting of a component
    assert str(folder.parent) not in card.content and str(Path.home()) not in card.content

    assert main(["export", str(folder), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    half = (tmp_path / "half" / "README.md").read_text()
    assert half == card.content.replace("as safetensors in float32", "as safetensors in bfloat16")


def test_a_prompt_longer_than_the_context_is_a_failed_episode(first_run):
    folder, shown = first_run
    assert re.search("3 of 12 episodes .*; example 'of-200', generation 0: PromptTooLongError", shown)
    assert [(row["failed_episodes"], row["groups"]) for row in metrics_of(folder)] == [(3, 3), (3, 3)]


@pytest.mark.slow
def test_prompts_longer_than_the_context_may_be_truncated(tmp_path):
    folder = tmp_path / "run"
    changes = {"finetuning__num_epochs": 1, "trainers__loop__max_failed_fraction": 0.1}
    train(run_config(folder, llms__policy__long_prompts="truncate_left", **changes))
    (row,) = metrics_of(folder)
    assert (row["failed_episodes"], row["dropped_episodes"], row["truncated_prompts"]) == (0, 0, 3)
    assert row["groups"] == 4
    # What is trained on is what was fed: the trainer finds the sampler's numbers again.
    assert 0 < row["sampler_logprob_diff_max"] <= MAX_DIFFERENCE


def test_a_model_that_is_not_there_ends_in_one_message(tmp_path):
    with pytest.raises(jaxft.ComponentError, match="preset is 'qwen3-9b'; wanted one of"):
        train(run_config(tmp_path / "run", llms__policy__preset="qwen3-9b"))


@pytest.fixture(scope="module")
def tic_tac_toe():
    spec = importlib.util.spec_from_file_location("tic_tac_toe_experiment", ROOT / "experiments" / "tic_tac_toe.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_board_knows_a_win(tic_tac_toe):
    board = tic_tac_toe.Board()
    for cell in (1, 5, 9):
        assert not board.has_won("X")
        board.place(cell, "X")
    board.place(2, "O")
    assert board.has_won("X") and not board.has_won("O")
    assert board.free() == [3, 4, 6, 7, 8] and str(board) == "XO3\n4X6\n78X"


def test_conversations_to_learn_from_are_legal_games(tic_tac_toe):
    draw = random.Random(0)
    for _ in range(200):
        messages = tic_tac_toe.random_conversation(draw)
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        board = tic_tac_toe.Board()
        for shown, move in zip(messages[::2], messages[1::2], strict=True):
            taken = [cell for cell in board.free() if str(cell) not in shown["content"]]
            assert len(taken) == (shown is not messages[0])  # the opponent has moved once
            for cell in taken:
                board.place(cell, "O")
            assert shown["content"] == str(board) and not board.has_won("O")
            assert int(move["content"]) in board.free()
            board.place(int(move["content"]), "X")
        # The game is over, or O's next move would end it.
        assert board.has_won("X") or not board.free() or len(messages) >= 6


# --- Compiles.


@pytest.mark.slow
def test_a_strict_run_compiles_everything_before_its_second_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(local_adapter, "warm_up_rounds", lambda platform: 3)  # the policy again, as on GPUs
    changes = {
        "trainers__loop__max_staleness": 1,
        "finetuning__num_epochs": 4,
        "finetuning__strict_compile": True,
        "trainer_adapters__local__num_iterations": 2,
        "trainer_adapters__local__num_minibatches": 2,
        "trainer_adapters__local__microbatch_tokens": 16,
        "trainer_adapters__local__loss": {"name": "grpo", "beta": 0.1},
    }
    config = run_config(tmp_path / "run", **changes)
    train(config)  # the lengths of answers, and so the shapes of batches, differ from epoch to epoch
    rows = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    counts = [row["compiles"] for row in rows]
    assert len(counts) == 4 and set(counts[1:]) == {counts[0]}


class CompilingConfig(jaxft.WorkflowConfig, name="e2e_compiling"):
    llm: jaxft.LLMRef


@jaxft.register_workflow(config_type=CompilingConfig)
async def compiling(config: CompilingConfig, builder: Any) -> Any:
    """An agent that computes with arrays of a new shape in every epoch."""
    llm = await builder.get_llm(config.llm)

    async def play(example: dict) -> float:
        reply = await llm.chat([{"role": "user", "content": "a" * example["length"]}], max_tokens=5)
        shape = 1 + jaxft.episode().rollout_index
        return float(jax.jit(lambda x: x.sum())(jnp.zeros(shape))) + sum(reply.token_ids)

    yield play


@pytest.mark.slow
def test_a_strict_run_fails_when_something_compiles(tmp_path):
    changes = {
        "finetuning__strict_compile": True,
        "llms__policy__max_context_tokens": 32,
        "workflow": {"_type": "e2e_compiling", "llm": "policy"},
        "trainer_adapters__local__microbatch_tokens": 16,
    }
    with pytest.raises(jaxft.JobFailed, match=r"epoch_00001 compiled \d+ programs .*strict_compile is on: .*lambda"):
        train(run_config(tmp_path / "run", **changes))

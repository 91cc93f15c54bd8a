"""Two policies in one episode: a game in which one is trained, against another model or its own earlier versions."""

import asyncio
import io
import json
from typing import Any

import pytest

pytest.importorskip("openai")

import jaxft
from jaxft.errors import ConfigError
from jaxft.rollout.sequences import TokenSequence
from jaxft.runs.console import Console
from tests.rollout.test_remote import completion, server  # noqa: F401  (a fixture, used by name)

ROUNDS, MAX_TOKENS = 2, 5
POLICY = {"_type": "local_policy", "preset": "qwen3-50k", "slots": 8, "max_context_tokens": 96}

played: dict[str, dict[str, Any]] = {}
"""Tokens and policy versions of each player, by the episodes of the last run."""


class GameConfig(jaxft.WorkflowConfig, name="self_play_game"):
    llm: jaxft.LLMRef
    opponent: jaxft.LLMRef
    referee: jaxft.LLMRef | None = None


@jaxft.register_workflow(config_type=GameConfig)
async def game(config: GameConfig, builder: Any) -> Any:
    """Both players are asked the same at once, one by openai's client, and answer each other from then on."""
    player, opponent = await builder.get_llm(config.llm), await builder.get_llm(config.opponent)
    client = await builder.get_llm(config.opponent, "openai")
    referee = None if config.referee is None else await builder.get_llm(config.referee)

    async def play(example: dict) -> float:
        record = played[jaxft.episode().id] = {config.llm: [], config.opponent: [], "versions": set()}
        views = [[{"role": "user", "content": example["question"]}] for _ in range(2)]
        for _ in range(ROUNDS):
            mine, theirs = await asyncio.gather(
                player.chat(views[0], max_tokens=MAX_TOKENS),
                client.chat.completions.create(model=config.opponent, messages=views[1], max_tokens=MAX_TOKENS),
            )
            last = jaxft.episode().calls[-1 if jaxft.episode().calls[-1].llm == config.opponent else -2]
            record[config.llm] += mine.token_ids
            record[config.opponent] += last.token_ids
            record["versions"].add((mine.policy_version, last.reply.policy_version))
            said = mine.content, theirs.choices[0].message.content
            for view, own, other in zip(views, said, reversed(said), strict=True):
                view += [{"role": "assistant", "content": own}, {"role": "user", "content": other}]
        if referee is not None:
            await referee.chat([{"role": "user", "content": "who has won?"}])
        return float(sum(record[config.llm]) > sum(record[config.opponent]))

    assert opponent.name == config.opponent
    yield play


class WonConfig(jaxft.EvaluatorConfig, name="self_play_won"):
    pass


@jaxft.register_evaluator(config_type=WonConfig)
async def won(config: WonConfig, builder: Any) -> Any:
    yield lambda item: item.output_obj


class OpeningsConfig(jaxft.DatasetConfig, name="self_play_openings"):
    pass


@jaxft.register_dataset_loader(config_type=OpeningsConfig)
async def openings(config: OpeningsConfig, builder: Any) -> Any:
    yield [jaxft.EvalInputItem(id=name, full_dataset_entry={"question": name}) for name in "abc"]


def run_config(folder, llms, **changes):
    """The sections of a run; `changes` maps dotted paths to values."""
    mapping = {
        "llms": {"policy": POLICY, **llms},
        "workflow": {"_type": "self_play_game", "llm": "policy", "opponent": "opponent"},
        "eval": {
            "general": {"dataset": {"_type": "self_play_openings"}},
            "evaluators": {"won": {"_type": "self_play_won"}},
        },
        "trajectory_builders": {"rollouts": {"_type": "grpo_trajectory_builder", "num_generations": 4}},
        "trainer_adapters": {
            "local": {
                "_type": "local_trainer_adapter",
                "llm": "policy",
                "optimizer": {"learning_rate": 1e-2},
                "microbatch_tokens": 512,
            }
        },
        "trainers": {"loop": {"_type": "grpo_trainer", "save_episodes": "all"}},
        "finetuning": {
            "enabled": True,
            "trainer": "loop",
            "trajectory_builder": "rollouts",
            "trainer_adapter": "local",
            "reward_function": {"name": "won"},
            "target_model": "policy",
            "num_epochs": 1,
            "output_dir": str(folder),
        },
    }
    overrides = [(path.replace("__", "."), json.dumps(value)) for path, value in changes.items()]
    return jaxft.config_from_mapping(mapping, base_dir=folder.parent, overrides=overrides)


def train(config, **options):
    """Trains and exports; the rows of metrics."""
    played.clear()

    async def main():
        async with jaxft.open_session(config, console=Console(io.StringIO()), **options) as session:
            await session.train()
            await session.export_model()

    asyncio.run(main())
    return [json.loads(line) for line in (config.finetuning.output_dir / "training_metrics.jsonl").open()]


def saved_trajectories(folder):
    return [json.loads(line) for line in (folder / "trajectories" / "samples.jsonl").open()]


def files(folder):
    names = [
        "training_metrics.jsonl",
        "model/model.safetensors",
        "model/README.md",
        "trajectories/samples.jsonl",
    ]
    return {name: (folder / name).read_bytes() for name in names}


SNAPSHOT = {"opponent": {"_type": "local_policy", "snapshot_of": "policy", "every": 2}}
EPOCHS = 4


@pytest.fixture(scope="module")
def self_play(tmp_path_factory):
    """A whole run against earlier versions, and the versions that played in each epoch."""
    folder = tmp_path_factory.mktemp("self_play") / "run"
    rows = train(run_config(folder, SNAPSHOT, finetuning__num_epochs=EPOCHS))
    return folder, rows, {name: record["versions"] for name, record in played.items()}


def test_the_opponent_is_the_version_that_it_should_be(self_play):
    _, rows, versions = self_play
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    for name, found in versions.items():
        epoch = int(name.split("/")[1])
        assert found == {(epoch, epoch // 2 * 2)}, name
    for row in rows:
        assert (row["stale_token_fraction"], row["untargeted_calls"], row["foreign_sequences"]) == (0.0, 24, 0)
        assert row["sampler_disagreement_fraction"] == 0.0


def test_only_the_target_of_several_models_is_trained(tmp_path, server):  # noqa: F811
    server.answer = lambda request: completion("both")
    llms = {"opponent": POLICY, "referee": {"_type": "openai", "model": "m", "base_url": server.url, "api_key": "k"}}
    config = run_config(tmp_path / "aimed", llms, workflow__referee="referee")
    (row,) = train(config)
    counts = {"episodes": 12, "calls": 48, "untargeted_calls": 24, "remote_calls": 12, "outside_calls": 0}
    counts |= {"foreign_sequences": 0, "sequences_per_trajectory": 1.0, "stale_token_fraction": 0.0, "groups": 3}
    assert row.items() >= counts.items() and row["applied_updates"] == 1.0
    assert 0 < row["sampler_logprob_diff_max"] <= 1e-5  # what is trained on is what the policy was fed and said
    trained = 0
    for trajectory in saved_trajectories(config.finetuning.output_dir):
        (sequence,) = map(TokenSequence.model_validate, trajectory["sequences"])
        chosen = [t for t, mask in zip(sequence.tokens, sequence.completion_mask, strict=True) if mask]
        where = f"training/0/{trajectory['example_id']}/{trajectory['generation']}"
        assert sequence.llm == "policy" and chosen == played[where]["policy"] != played[where]["opponent"]
        trained += len(chosen)
    assert row["trained_tokens"] == trained


@pytest.mark.slow
def test_training_that_is_aimed_at_all_leaves_out_the_opponents_rows(tmp_path, server):  # noqa: F811
    """The result is the same."""
    server.answer = lambda request: completion("both")
    llms = {"opponent": POLICY, "referee": {"_type": "openai", "model": "m", "base_url": server.url, "api_key": "k"}}
    (row,) = train(run_config(tmp_path / "aimed", llms, workflow__referee="referee"))
    unaimed = run_config(tmp_path / "unaimed", llms, workflow__referee="referee", finetuning__target_model=None)
    (other,) = train(unaimed)
    assert (other["untargeted_calls"], other["foreign_sequences"]) == (0, 12)
    changed = ("untargeted_calls", "foreign_sequences", "completion_tokens_mean", "completion_tokens_max")
    assert {name for name in row if row[name] != other[name]} == set(changed)
    model = "model/model.safetensors"
    assert files(tmp_path / "aimed")[model] == files(tmp_path / "unaimed")[model]


@pytest.mark.slow
def test_self_play_repeats_its_bytes(self_play, tmp_path):
    train(run_config(tmp_path / "again", SNAPSHOT, finetuning__num_epochs=EPOCHS, eval__general__max_concurrency=1))
    assert files(tmp_path / "again") == files(self_play[0])


@pytest.mark.slow
def test_a_resumed_run_has_the_same_opponent(self_play, tmp_path):
    folder = tmp_path / "resumed"
    train(run_config(folder, SNAPSHOT, finetuning__num_epochs=3))  # the opponent is version 2, the policy is 3
    with pytest.raises(ConfigError, match=r"llms\.opponent\.snapshot_of: was 'policy' and is not set"):
        train(run_config(folder, {"opponent": POLICY}, finetuning__num_epochs=EPOCHS), resume=True)
    train(run_config(folder, SNAPSHOT, finetuning__num_epochs=EPOCHS), resume=True)
    assert files(folder) == files(self_play[0])


@pytest.mark.slow
def test_an_evaluation_plays_against_the_policy_itself(tmp_path):
    config = run_config(tmp_path / "evaluated", SNAPSHOT)
    played.clear()

    async def main():
        async with jaxft.open_session(config, console=Console(io.StringIO())) as session:
            output = await session.evaluate()
            policy = (await session.builder.get_llm("policy")).policy
            return output, await policy.read(lambda params: dict(policy.weights.beside))

    output, kept = asyncio.run(main())
    assert (output.num_episodes, output.num_failed, kept) == (3, 0, {})
    assert all(record["policy"] == record["opponent"] for record in played.values())  # both play greedily

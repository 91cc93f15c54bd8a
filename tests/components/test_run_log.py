"""The line of an epoch: columns that stay, and metrics that are shown when they matter."""

import io

import pytest

from jaxft.components.run_log import RunLog
from jaxft.harness.data_models import EpisodeItem, Trajectory
from jaxft.rollout.sequences import token_sequences
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


def test_a_column_stays_and_what_matters_comes_behind_it(tmp_path):
    stream = io.StringIO()
    names = ("truncated_fraction", "clip_high_fraction", "sampler_logprob_diff_max", "failed_episodes")
    quiet, loud = (dict(zip(names, values, strict=True)) for values in ((0.009, 0.009, 0.09, 0), (0.25, 0.01, 0.1, 0)))
    with RunDirectory.create(tmp_path / "run") as directory:
        log = RunLog(directory, Console(stream))
        log.epoch(0, "epoch_00000", {"reward_mean": 0.25, "entropy": 2.0, "tokens_per_second": 100.0, **quiet})
        log.epoch(1, "epoch_00001", {"reward_mean": None, "tokens_per_second": 90.0, **quiet})
        log.epoch(2, "epoch_00002", {"reward_mean": 0.5, "tokens_per_second": 80.0, **quiet, "failed_episodes": 2})
        log.epoch(3, "epoch_00003", {"reward_mean": 1.0, "tokens_per_second": 70.0, **loud})
    first, no_reward, failed, *mismatch = stream.getvalue().splitlines()
    assert first.split()[2:] == ["reward", "0.25", "entropy", "2", "tok/s", "100"]
    assert no_reward.split()[2:] == ["reward", "-", "entropy", "-", "tok/s", "90"]
    assert failed.split()[-2:] == ["failed", "2"]
    assert " ".join(mismatch).split()[-7:] == ["cut", "0.25", "clip", "0.01", "sampler", "diff", "0.1"]
    assert len({line.index("tok/s") for line in (first, no_reward, failed, mismatch[0])}) == 1


@pytest.mark.parametrize(
    ("finish_reasons", "ended"),
    [
        (["stop"], ", finish_reason stop"),
        (["length", "stop", "stop"], ", finish_reason length, stop, stop"),
        ([], ""),
        (None, ""),
    ],
)
def test_a_sample_says_how_its_answers_ended(tmp_path, finish_reasons, ended):
    stream, metadata = io.StringIO(), None if finish_reasons is None else {"finish_reasons": finish_reasons}
    asked = EpisodeItem(role="user", content="and so?")
    trajectory = Trajectory(episode=[asked], reward=0.5, example_id="7", metadata=metadata)
    with RunDirectory.create(tmp_path / "run") as directory:
        RunLog(directory, Console(stream)).sample(3, trajectory)
    assert stream.getvalue().splitlines()[0] == f"--- after 3 epochs, example 7, reward 0.5{ended}"


def test_a_sample_tells_of_the_answers_of_the_policy_alone(tmp_path, make_call):
    models = ("policy", "opponent", "policy", "opponent")
    reasons = ("length", "length", "stop", "length")
    calls = [
        make_call(turn, [turn], [9], llm=llm, finish_reason=reason)
        for turn, (llm, reason) in enumerate(zip(models, reasons, strict=True))
    ]
    sequences, asked = token_sequences(calls), EpisodeItem(role="user", content="and so?")
    trajectory = Trajectory(
        episode=[asked], reward=0.5, example_id="7", sequences=sequences, metadata={"finish_reasons": reasons}
    )
    with RunDirectory.create(tmp_path / "run") as directory:
        log = RunLog(directory, Console(stream := io.StringIO()))
        log.decode["policy"] = str
        log.sample(3, trajectory)
    assert "finish_reason length, stop\n" in stream.getvalue()


def test_a_validation_of_several_generations_shows_its_scores_of_the_most(tmp_path):
    stream, row = io.StringIO(), {"epoch": 2, "avg_reward": 0.25, "num_examples": 8, "num_failed": 0}
    scores = {"pass@1": 0.25, "maj@1": 0.25, "pass@4": 0.5, "maj@4": 0.375, "best@4": 0.75, "level=2/pass@4": 1.0}
    with RunDirectory.create(tmp_path / "run") as directory:
        RunLog(directory, Console(stream)).validation(row | scores | {"num_unscorable": 0})
    assert "reward 0.25, 8 episodes, pass@4 0.5, maj@4 0.375\n" in stream.getvalue()

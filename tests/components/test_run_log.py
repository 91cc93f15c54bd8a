"""The line of an epoch: columns that stay, and metrics that are shown when they matter."""

import io

from jaxft.components.run_log import RunLog
from jaxft.runs.console import Console
from jaxft.runs.directory import RunDirectory


def test_a_column_stays_and_what_matters_comes_behind_it(tmp_path):
    stream = io.StringIO()
    quiet = {"clip_high_fraction": 0.009, "sampler_logprob_diff_max": 0.09, "failed_episodes": 0}
    with RunDirectory.create(tmp_path / "run") as directory:
        log = RunLog(directory, Console(stream))
        log.epoch(0, "epoch_00000", {"reward_mean": 0.25, "entropy": 2.0, "tokens_per_second": 100.0, **quiet})
        log.epoch(1, "epoch_00001", {"reward_mean": None, "tokens_per_second": 90.0, **quiet})
        log.epoch(2, "epoch_00002", {"reward_mean": 0.5, "tokens_per_second": 80.0, **quiet, "failed_episodes": 2})
        loud = {"clip_high_fraction": 0.01, "sampler_logprob_diff_max": 0.1, "failed_episodes": 0}
        log.epoch(3, "epoch_00003", {"reward_mean": 1.0, "tokens_per_second": 70.0, **loud})
    first, no_reward, failed, *mismatch = stream.getvalue().splitlines()
    assert first.split()[2:] == ["reward", "0.25", "entropy", "2", "tok/s", "100"]
    assert no_reward.split()[2:] == ["reward", "-", "entropy", "-", "tok/s", "90"]
    assert failed.split()[-2:] == ["failed", "2"]
    assert " ".join(mismatch).split()[-5:] == ["clip", "0.01", "sampler", "diff", "0.1"]
    assert len({line.index("tok/s") for line in (first, no_reward, failed, mismatch[0])}) == 1


def test_a_validation_of_several_generations_shows_its_scores_of_the_most(tmp_path):
    stream, row = io.StringIO(), {"epoch": 2, "avg_reward": 0.25, "num_examples": 8, "num_failed": 0}
    scores = {"pass@1": 0.25, "maj@1": 0.25, "pass@4": 0.5, "maj@4": 0.375, "best@4": 0.75, "level=2/pass@4": 1.0}
    with RunDirectory.create(tmp_path / "run") as directory:
        RunLog(directory, Console(stream)).validation(row | scores | {"num_unscorable": 0})
    assert "reward 0.25, 8 episodes, pass@4 0.5, maj@4 0.375\n" in stream.getvalue()

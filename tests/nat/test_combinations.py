"""The user's and jaxft's three parts, in all eight combinations."""

import itertools
import json

import numpy as np
import pytest

from jaxft.harness import data_models as own
from jaxft.nat.foreign import from_toolkit_collection, to_toolkit_collection
from jaxft.rollout.sequences import TokenSequence

pytestmark = pytest.mark.nat


@pytest.mark.parametrize(("builder", "adapter", "trainer"), itertools.product(("own", "user"), repeat=3))
def test_parts_of_the_user_and_of_jaxft_train_together(finetune, folder, builder, adapter, trainer):
    finetune(finetuning__trajectory_builder=builder, finetuning__trainer_adapter=adapter, finetuning__trainer=trainer)
    if trainer == "own":
        rows = [json.loads(line) for line in (folder / "out/training_metrics.jsonl").read_text().splitlines()]
        assert [row["epoch"] for row in rows] == [0, 1]
        assert all(0 <= row["avg_reward"] <= 1 for row in rows)
        if adapter == "own":
            assert [row["applied_updates"] for row in rows] == [1, 1]
            assert all(row["sampler_logprob_diff_max"] < 1e-4 for row in rows)
    else:
        statuses = json.loads((folder / "statuses.json").read_text())
        assert [status["status"] for status in statuses] == ["completed"] * 2
        if adapter == "own":
            metrics = [status["metadata"]["metrics"] for status in statuses]
            assert [each["policy_version"] for each in metrics] == [1, 2]
            assert all(each["sampler_logprob_diff_max"] < 1e-4 for each in metrics)
            assert all(each["groups"] == 4 for each in metrics)
    if adapter == "user":
        submitted = [json.loads(line) for line in (folder / "submitted.jsonl").read_text().splitlines()]
        assert len(submitted) == 2
        for collection in submitted:
            assert [len(group) for group in collection["trajectories"]] == [4] * 4
            answers = [each["episode"][-1] for group in collection["trajectories"] for each in group]
            content = [answer["logprobs"]["content"] for answer in answers]
            assert all(np.isfinite(entry["logprob"]) for entries in content for entry in entries)
            assert len({json.dumps([entry["logprob"] for entry in entries]) for entries in content}) > 8


def test_a_foreign_trainer_leaves_the_trained_model(finetune, folder):
    for number in range(2):
        finetune(finetuning__trainer="user", finetuning__trajectory_builder=("own", "user")[number])
        assert (folder / "out/jaxft/model/model.safetensors").is_file()
        assert json.loads((folder / "out/jaxft/result.json").read_text())["model"] == "model"
        assert "ended" not in (folder / "out/jaxft/run.log").read_text()


def test_answers_of_equal_log_probabilities_keep_their_tokens():
    fields = {"temperatures": [1.0] * 4, "policy_versions": [0] * 4, "completion_mask": [False, True, True, True]}
    sequence = TokenSequence(
        tokens=[1, 7, 8, 9], turns=[-1, 0, 1, 2], sampler_logprobs=[0.0] * 4, behavior_logprobs=[0.0] * 4, **fields
    )
    items = [own.EpisodeItem(role="assistant", content="", logprobs=[0.0]) for _ in range(3)]
    known = {"example_id": "1", "generation": 2, "rollout_index": 3, "task": "sums"}
    trajectory = own.Trajectory(episode=items, reward=0.5, sequences=[sequence], **known)
    collection = own.TrajectoryCollection(trajectories=[[trajectory]], run_id="any")
    given = to_toolkit_collection(collection)
    tokens = [item.logprobs["content"][0]["token"] for item in given.trajectories[0][0].episode]
    assert tokens == ["token_id:7", "token_id:8", "token_id:9"]
    (back,) = from_toolkit_collection(given).trajectories[0]
    assert back.model_copy(update={"metadata": None}) == trajectory

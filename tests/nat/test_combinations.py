"""The user's and jaxft's three parts, in all eight combinations."""

import itertools
import json

import numpy as np
import pytest

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

"""Batches of updates that were not finite: kept whole, named, and few of them."""

import asyncio
import io
import unicodedata
import zipfile

import jax
import numpy as np
import pytest

import jaxft.training.batch as batch_module
from jaxft.components.configs import LocalTrainerAdapterConfig
from jaxft.components.local_adapter import LocalTrainerAdapter
from jaxft.core.packing import unpack
from jaxft.errors import RunDirectoryError
from jaxft.harness.data_models import TrainingStatusEnum
from jaxft.models.bridge import from_function
from jaxft.redaction import hiding
from jaxft.runs.directory import RunDirectory
from jaxft.training.batch import BatchPlanner, Row, make_batch
from jaxft.training.job_records import MAX_KEPT, BadBatches, BadUpdate
from jaxft.training.rows import gather_rows

HUGE = 3e38  # a reward that fits float32; the difference from its negative does not
STRANGE_IDS = [
    *("../../escaped", "/absolute", "..", ".hidden", "a/b", "a\\b", "C:\\x", "nul", "con.txt", "dot.", "dot"),
    *("NUL\0inside", "line\nfeed", "x" * 300, "emoji \N{GRINNING FACE}", "lone \ud800", "CAPITAL", "capital", ""),
    *(unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")),
]


@pytest.fixture
def directory(tmp_path):
    with RunDirectory.create(tmp_path / "run") as made:
        yield made


@pytest.fixture
def make_bad_update(make_collection):
    """An update on the four trajectories of a collection, and their groups."""

    def make(number=1, changes=None):
        gathered = gather_rows(make_collection("any", changes=changes), llm="policy", mask_truncated=False)
        metrics = {"loss": np.float32("nan"), "entropy": np.float32(0.5)}
        return BadUpdate(number, metrics, make_batch(gathered.rows, BatchPlanner(64, packed=True))), gathered.groups

    return make


def bigrams(params, tokens, positions):
    return params["table"][tokens]


def files(directory):
    return sorted(path.name for path in (directory.path / "bad_batches").iterdir())


def test_a_job_says_where_the_batches_of_its_bad_updates_are(
    foreign_trajectories, make_policy, directory, make_collection
):
    """Two updates on two trajectories each; those with a huge reward are bad, or one of them is in each."""
    config = LocalTrainerAdapterConfig(
        llm="policy",
        loss={"advantages": "leave_one_out"},
        optimizer={"learning_rate": 1e-3},
        microbatch_tokens=128,
        num_minibatches=2,
    )
    policy = make_policy(model=from_function(bigrams), params={"table": jax.device_put(np.eye(262, dtype=np.float32))})
    adapter = LocalTrainerAdapter(config, policy, bad_batches=BadBatches(directory, print))
    collection = make_collection("epoch_00000", rewards=(HUGE, -HUGE, 1.0, 0.0))
    for number, group in enumerate(collection.trajectories):  # two collections began a group of the same example
        for each in group:
            each.example_id, each.rollout_index = "one", number
    kept = collection.trajectories[1][1]
    collection.kept_episodes = [kept.identity]

    async def main():
        async with asyncio.timeout(60):
            return await adapter.wait_until_complete(await adapter.submit(collection))

    status = asyncio.run(main())
    metrics = status.metadata["metrics"]
    assert status.status is TrainingStatusEnum.COMPLETED and metrics["updates"] == 2
    names = [name for name in files(directory) if name.endswith(".npz")]
    assert len(names) == metrics["nonfinite_updates"] > 0
    files_of_batches = ", ".join(f"bad_batches/{name}" for name in names)
    assert status.message.startswith("loss, gradient or new parameters were not finite; ")
    assert status.message.endswith(f"; the batch of each is kept: {files_of_batches}")
    (scores,) = status.metadata["token_scores"]
    assert (scores["example_id"], scores["generation"], scores["rollout_index"]) == kept.identity == ("one", 1, 1)

    trajectories = {t.identity: t for group in collection.trajectories for t in group}
    for name in names:
        described = directory.read_json(f"bad_batches/{name[:-3]}json")
        assert described["metrics"]["loss"] is None and "metrics.loss" in described["non_finite"]
        assert described["metrics"]["entropy"] > 0 and len(described["sequences"]) == 2
        with np.load(directory.path / "bad_batches" / name, allow_pickle=False) as arrays:
            assert np.isinf(arrays["advantages"]).any() and "old_logprobs" in arrays and "ref_logprobs" not in arrays
            for place in described["sequences"]:
                span = place["row"], slice(place["start"], place["start"] + place["tokens"])
                trajectory = trajectories[place["example_id"], place["generation"], place["rollout_index"]]
                assert arrays["tokens"][span].tolist() == trajectory.sequences[0].tokens


def test_equal_runs_keep_equal_files(make_bad_update, tmp_path):
    """To the byte; arrays in a zip file carry a date."""
    contents = []
    for name in ("one", "two"):
        with RunDirectory.create(tmp_path / name) as directory:
            update, groups = make_bad_update()
            BadBatches(directory, print).keep("epoch_00000", [update], groups)
        contents.append([path.read_bytes() for path in sorted((directory.path / "bad_batches").iterdir())])
    assert len(contents[0]) == 2 and contents[0] == contents[1]
    with zipfile.ZipFile(io.BytesIO(contents[0][1])) as arrays:
        assert {info.date_time for info in arrays.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_so_many_are_kept_and_no_more_which_is_said_once(make_bad_update, directory):
    said = []
    batches = BadBatches(directory, said.append)
    kept = [
        batches.keep(f"epoch_{epoch:05d}", [make_bad_update(1)[0], make_bad_update(2)[0]], make_bad_update()[1])
        for epoch in range(3)
    ]
    stems = ["epoch_00000-1", "epoch_00000-2", "epoch_00001-1"]
    assert MAX_KEPT == 3 and kept == [
        [f"bad_batches/{stem}.npz" for stem in stems[:2]],
        [f"bad_batches/{stems[2]}.npz"],
        [],
    ]
    assert files(directory) == [f"{stem}.{kind}" for stem in stems for kind in ("json", "npz")]
    assert len(said) == 1 and "bad_batches holds 3 batches" in said[0]
    # A run that is resumed repeats the epoch that was cut off, and counts what is there.
    update, groups = make_bad_update()
    resumed = BadBatches(directory, said.append)
    assert resumed.keep("epoch_00001", [update], groups) == ["bad_batches/epoch_00001-1.npz"]
    assert resumed.keep("epoch_00002", [update], groups) == [] and len(said) == 2


def test_token_ids_that_spell_a_secret_are_masked(make_bad_update, directory, tokenizer):
    spelled = tokenizer.encode("key sk-TEST-SENTINEL!")
    names = ("sampler_logprobs", "behavior_logprobs", "temperatures", "policy_versions")
    row = {name: [1] * len(spelled) for name in names} | {"tokens": spelled}
    row["completion_mask"] = [False] + [True] * (len(spelled) - 1)
    update, groups = make_bad_update(changes={0: row})
    with hiding(["sk-TEST-SENTINEL"]):
        BadBatches(directory, print, tokenizer.decode).keep("epoch_00000", [update], groups)
    place = directory.read_json("bad_batches/epoch_00000-1.json")["sequences"][0]
    with np.load(directory.path / "bad_batches" / "epoch_00000-1.npz") as arrays:
        kept = arrays["tokens"][place["row"], place["start"] :][: len(spelled)].tolist()
        assert (arrays["tokens"] == -1).sum() == kept.count(-1)  # of the other sequences none
    assert tokenizer.decode([token for token in kept if token >= 0]) == "key !"


def test_a_secret_is_masked_across_the_end_of_a_shared_prefix(make_sequence, directory, tokenizer, monkeypatch):
    monkeypatch.setattr(batch_module, "LEAST_SAVED", 0)
    rows = []
    for i, text in enumerate(("my sk-TEST-SENTINEL! aa", "my sk-TEST-SENTINEL! bb", "my sk-TEST-SEVERAL? cc")):
        tokens = [5] * 40 + tokenizer.encode(text)
        names = ("sampler_logprobs", "behavior_logprobs", "temperatures", "policy_versions")
        mask = [place >= len(tokens) - 2 for place in range(len(tokens))]
        rows.append(
            Row(make_sequence(**dict.fromkeys(names, [1] * len(tokens)), tokens=tokens, completion_mask=mask), i)
        )
    batch = make_batch(rows, BatchPlanner(1024, packed=True, shared_tokens=1024))
    with hiding(["sk-TEST-SENTINEL"]):
        BadBatches(directory, print, tokenizer.decode).keep("epoch_00000", [BadUpdate(1, {}, batch)], [])
    written = directory.read_json("bad_batches/epoch_00000-1.json")
    with np.load(directory.path / "bad_batches" / "epoch_00000-1.npz") as arrays:
        kept = unpack(batch.packing, arrays["tokens"])
    assert written["prefix_tokens"] >= max(place.get("shared", 0) for place in written["sequences"]) > 40
    for row, found in zip(rows[:2], kept, strict=False):
        assert (found == -1).sum() >= len("sk-TEST-SENTINEL")
        assert all(token in (-1, right) for token, right in zip(found.tolist(), row.sequence.tokens, strict=True))


def test_pairs_are_counted_where_episodes_are_not_known(make_bad_update, directory):
    update, _ = make_bad_update()
    BadBatches(directory, print).keep("epoch_00000", [update], [])
    described = directory.read_json("bad_batches/epoch_00000-1.json")
    assert [each["trajectory"] for each in described["sequences"]] == [0, 1, 2, 3]


def test_jobs_of_any_name_stay_inside_and_apart(make_bad_update, directory, tmp_path):
    update, groups = make_bad_update()
    names = []
    for number, run_id in enumerate(STRANGE_IDS):
        (name,) = BadBatches(directory, print).keep(run_id, [update], groups)
        assert directory.read_json(f"{name[:-3]}json")["run_id"] == run_id
        names.append(name.casefold())
        (directory.path / "bad_batches").rename(directory.path / f"bad_batches_{number}")  # room for the next
    assert len(set(names)) == len(STRANGE_IDS)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 2 * len(STRANGE_IDS) + 2  # the lock and its holder
    assert all(path.parent.name.startswith("bad_batches_") for path in written if not path.name.startswith("LOCK"))


def test_a_folder_that_leads_outside_is_refused(make_bad_update, directory, tmp_path):
    (tmp_path / "outside").mkdir()
    (directory.path / "bad_batches").symlink_to(tmp_path / "outside")
    update, groups = make_bad_update()
    with pytest.raises(RunDirectoryError, match=r"'bad_batches/epoch_00000-1\.npz' is not .* a symbolic link leads"):
        BadBatches(directory, print).keep("epoch_00000", [update], groups)
    assert list((tmp_path / "outside").iterdir()) == []

"""Checkpoints: what was saved comes back bit for bit, and what is not whole does not count."""

import contextlib
import gc
import json
import logging
import os
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft.errors import CheckpointError, DiskFull, RestoreError, RunDirectoryError
from jaxft.files import MANIFEST, read_manifest, write_manifest
from jaxft.harness.runtime import run_main
from jaxft.runs import checkpoint as module
from jaxft.runs.checkpoint import Checkpoints, layout
from jaxft.runs.directory import RunDirectory
from tests.faults.injection import damages, limited_file_size, small_disk

FIXTURE = Path(__file__).parents[1] / "data" / "checkpoint_v1"


class Moments(NamedTuple):
    """As optax keeps them."""

    count: jax.Array
    mean: dict


def trees(start=0.0):
    """Parameters, an optimiser's state, nothing, a scalar; no division by a constant, whose bits depend on jax."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3) + np.float32(start)
    made = {
        "params": {"ends": {"embedding": weights}, "layers": {"scale": (weights[0] / 3).astype(jnp.bfloat16)}},
        "opt_state": (Moments(np.int32(7), {"embedding": weights * np.float32(1 / 7)}), ()),
        "ref_params": None,
        "step": np.int32(3),
    }
    return jax.tree.map(jnp.asarray, made)


STATE = {"step": 1, "trainer": {"epoch": 1, "history": [0.1, None]}, "notes": {"before": {"x wins": 3}}}


def zeros():
    return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), trees())


def same_bits(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), got, expected)


@pytest.fixture
def directory(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        yield directory


@pytest.fixture
def open_checkpoints(directory):
    """Opens the checkpoints of one run, as often as asked."""
    opened = []

    def open_again(**options):
        opened.append(Checkpoints(directory, **options))
        return opened[-1]

    yield open_again
    for checkpoints in opened:
        checkpoints.close()


def save(checkpoints, *steps, scores=None):
    for step in steps:
        checkpoints.save(step, STATE | {"step": step}, trees(step), score=(scores or {}).get(step))
    checkpoints.wait()


def test_what_was_saved_comes_back(open_checkpoints):
    checkpoints = open_checkpoints()
    arrays = trees()
    kept = jax.tree.map(lambda leaf: np.array(leaf), arrays)
    checkpoints.save(5, STATE, arrays)
    # The arrays may go as soon as `save` returns: the next update is given them.
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(arrays)
    checkpoints.wait()
    again, said = open_checkpoints(), []
    found = again.newest(said.append)
    assert (found.step, said) == (5, [])
    assert {name: found.state[name] for name in STATE} == STATE
    same_bits(again.arrays(found, zeros()), kept)


def test_a_run_without_arrays_is_saved_too(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(0, STATE, {})
    checkpoints.wait()
    assert checkpoints.arrays(checkpoints.newest(print), {}) == {}


def test_the_newest_and_the_best_are_kept(open_checkpoints):
    checkpoints = open_checkpoints(max_to_keep=2)
    save(checkpoints, 0, 1, 2, 3, 4, scores={0: 0.1, 1: 0.9, 2: 0.3, 4: 0.5})
    assert checkpoints.steps() == [1, 3, 4]
    save(checkpoints, 5, scores={5: 0.9})  # as good: the newer one
    assert checkpoints.steps() == [4, 5]


def test_a_step_that_is_saved_again_is_put_back_if_the_new_one_is_not_finished(open_checkpoints):
    save(open_checkpoints(max_to_keep=1), 1, 2)
    again = open_checkpoints(max_to_keep=1)
    again.save(2, STATE | {"step": 2}, trees(5), score=0.9, is_again=True)
    again.wait()
    assert [entry.name for entry in again.folder.iterdir()] == ["2"]
    assert read_manifest(again.folder / "2")["score"] == 0.9
    same_bits(again.arrays(again.newest(print), zeros()), trees(5))

    (again.folder / "2").rename(again.folder / "2.replaced")
    (again.folder / "2").mkdir()  # where a kill left it
    late, said = open_checkpoints(max_to_keep=1), []
    found = late.newest(said.append)
    assert (found.step, said, late.steps()) == (2, [], [2])
    same_bits(late.arrays(found, zeros()), trees(5))
    save(late, 3)
    assert late.steps() == [2, 3]


def test_the_old_one_goes_only_when_the_new_one_is_good(open_checkpoints, monkeypatch):
    checkpoints = open_checkpoints(max_to_keep=1)
    save(checkpoints, 0)

    def write_and_spoil(folder, extra):
        path = write_manifest(folder, extra)
        damages(random.Random(0))["flipped bit"](next(iter((folder / "state").iterdir())))
        return path

    monkeypatch.setattr(module, "write_manifest", write_and_spoil)
    checkpoints.save(1, STATE, trees())
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be written to .*other content"):
        checkpoints.wait()
    assert checkpoints.steps() == [0, 1]
    said = []
    assert checkpoints.newest(said.append).step == 0
    assert len(said) == 1 and said[0].startswith("checkpoint 1 is damaged and is passed over: ")


def test_every_damage_to_any_file_is_found_and_the_step_before_restored(open_checkpoints, tmp_path):
    """Every file with one bit flipped, truncated, emptied and deleted."""
    checkpoints, draw = open_checkpoints(), random.Random(1)
    save(checkpoints, 1, 2)
    newest = checkpoints.folder / "2"
    shutil.copytree(newest, tmp_path / "whole")
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    large = [name for name in files if (newest / name).stat().st_size]
    ways = [(way, name) for way in ("flipped bit", "truncated", "emptied") for name in large]
    ways += [("deleted", name) for name in files]
    for way, name in ways:
        damages(draw)[way](newest / name)
        said = []
        assert checkpoints.newest(said.append).step == 1, (way, name)
        (sentence,) = said
        assert name.as_posix() in sentence, (way, name)
        is_unfinished = (way, name.name) == ("deleted", MANIFEST) and len(name.parts) == 1
        assert sentence.startswith(f"checkpoint 2 is {'unfinished' if is_unfinished else 'damaged'} and is passed over")
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "whole", newest)
    assert checkpoints.newest(print).step == 2
    same_bits(checkpoints.arrays(checkpoints.newest(print), trees()), trees(2))


def test_what_is_no_step_is_left_alone(open_checkpoints, tmp_path):
    checkpoints = open_checkpoints()
    save(checkpoints, 3)
    folder = checkpoints.folder
    for name in ("9", "010", "-1", "12x", "notes", "7.damaged"):
        (folder / name).mkdir()
    (folder / "11").write_text("a file")
    (folder / "20").symlink_to(folder / "3")
    (folder / "README").write_text("mine")
    again, said = open_checkpoints(max_to_keep=1), []
    found = again.newest(said.append)
    assert found.step == 3 and len(said) == 1 and said[0].startswith("checkpoint 9 is unfinished")
    again.set_aside(found.step)
    assert (folder / "9.damaged").is_dir() and not (folder / "9").exists()
    save(again, 9)
    assert again.newest(print).step == 9
    assert {path.name for path in folder.iterdir()} == {"README", "notes", "010", "-1", "11", "20", "12x", "9"}


def test_what_cannot_be_read_is_not_removed(open_checkpoints):
    checkpoints = open_checkpoints(max_to_keep=1)
    save(checkpoints, 1)
    (checkpoints.folder / "1" / MANIFEST).write_text("{}")
    (checkpoints.folder / "2").mkdir()
    save(checkpoints, 3, 4)
    assert checkpoints.steps() == [1, 2, 4]


def test_a_step_is_begun_once(open_checkpoints):
    checkpoints = open_checkpoints()
    checkpoints.save(1, STATE, trees())
    checkpoints.save(1, STATE, trees())
    checkpoints.wait()
    assert checkpoints.newest(print).step == 1


def test_steps_that_will_be_made_again_are_set_aside_once_more(open_checkpoints):
    checkpoints = open_checkpoints(max_to_keep=9)
    for _ in range(2):
        save(checkpoints, 1, 2, 3)
        checkpoints.set_aside(0)
    assert checkpoints.steps() == []
    assert {path.name for path in checkpoints.folder.iterdir()} == {"1.damaged", "2.damaged", "3.damaged"}


def test_nothing_finished_is_no_checkpoint_but_all_damaged_is_an_error(open_checkpoints):
    checkpoints, said = open_checkpoints(), []
    assert checkpoints.newest(said.append) is None and said == []
    (checkpoints.folder / "0").mkdir()
    assert checkpoints.newest(said.append) is None and "checkpoint 0 is unfinished" in said[0]
    save(checkpoints, 1, 2)
    for step in (1, 2):
        next((checkpoints.folder / str(step) / "state").iterdir()).write_bytes(b"{}")
    with pytest.raises(RestoreError, match=r"no checkpoint in .* verifies: put one back .* or start anew") as caught:
        checkpoints.newest(print)
    assert "2 is not what its manifest.json says" in str(caught.value) and "1 is not what" in str(caught.value)


def test_a_newer_format_is_refused_and_kept(open_checkpoints):
    checkpoints = open_checkpoints()
    save(checkpoints, 1, 2)
    newest = checkpoints.folder / "2"
    extra = {name: value for name, value in read_manifest(newest).items() if name in ("step", "score")}
    write_manifest(newest, extra | {"checkpoint_format": 99})
    with pytest.raises(RestoreError, match=r"2 is of checkpoint_format 99, newer than .* knows \(1\): update"):
        checkpoints.newest(print)


def test_another_layout_is_refused_with_every_difference(open_checkpoints):
    checkpoints = open_checkpoints()
    save(checkpoints, 1)
    found, like = checkpoints.newest(print), trees()
    like["params"]["ends"]["embedding"] = jnp.asarray(np.zeros((5, 3), jnp.bfloat16))
    like["ref_params"] = {"x": jnp.asarray(np.zeros(2, np.float32))}
    del like["params"]["layers"]
    with pytest.raises(RestoreError, match=r"checkpoint 1 does not fit this run \(3 differences\)") as caught:
        checkpoints.arrays(found, like)
    shown = str(caught.value)
    assert "params/ends/embedding: float32[4,3] in the checkpoint, bfloat16[5,3] here" in shown
    assert "params/layers/scale: bfloat16[3] in the checkpoint, nothing here" in shown
    assert "ref_params/x: nothing in the checkpoint, float32[2] here" in shown


def test_version_1_is_restored_for_ever(tmp_path, directory):
    """Made by this file's `make_fixture`, once; it is never made again."""
    shutil.copytree(FIXTURE, directory.path / "checkpoints")
    checkpoints, said = Checkpoints(directory), []
    found = checkpoints.newest(said.append)
    assert (found.step, said) == (4, [])
    assert {name: found.state[name] for name in STATE} == STATE | {"step": 4}
    same_bits(checkpoints.arrays(found, zeros()), trees(4.0))
    checkpoints.close()


def make_fixture():
    """Writes the checkpoint of format 1; orbax notes the path, so it is written where any machine might."""
    with RunDirectory.create("/tmp/jaxft_format_1") as directory:
        checkpoints = Checkpoints(directory)
        save(checkpoints, 4)
        checkpoints.close()
        shutil.copytree(checkpoints.folder / "4", FIXTURE / "4")
    shutil.rmtree(directory.path)


def test_the_layout_names_every_array():
    assert layout(trees()) == {
        "opt_state/0/count": "int32[]",
        "opt_state/0/mean/embedding": "float32[4,3]",
        "params/ends/embedding": "float32[4,3]",
        "params/layers/scale": "bfloat16[3]",
        "step": "int32[]",
    }
    assert json.loads(json.dumps(layout(trees()))) == layout(trees())


def fill(folder, capsys, limited, count):
    """Run out of space in the second of two saves, within `limited`; standard error."""

    async def save_twice():
        with RunDirectory.create(folder) as directory, contextlib.closing(Checkpoints(directory)) as checkpoints:
            checkpoints.save(1, {"notes": {}}, {"x": jnp.asarray(np.arange(100_000, dtype=np.float32))})
            checkpoints.wait()
            with limited:
                random = np.random.default_rng(0).normal(size=count).astype(np.float32)
                checkpoints.save(2, {"notes": {}}, {"x": jnp.asarray(random)})
                checkpoints.wait()

    assert run_main(save_twice) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and os.listdir(folder / "checkpoints") == ["1"]
    with RunDirectory.open(folder) as directory:
        checkpoints, said = Checkpoints(directory), []
        found = checkpoints.newest(said.append)
        assert found.step == 1
        restored = checkpoints.arrays(found, {"x": jnp.asarray(np.zeros(100_000, np.float32))})["x"]
        np.testing.assert_array_equal(restored, np.arange(100_000.0))
        checkpoints.close()
    return shown.rstrip()


def test_a_full_disk_names_path_and_free_bytes_and_spoils_nothing(tmp_path, capsys):
    shown = fill(tmp_path / "run", capsys, limited_file_size(200_000), 100_000)
    pattern = r"jaxft: error: '.*/run/checkpoints/2' cannot be written: File too large; \d+ bytes are free on its .*"
    assert re.fullmatch(pattern, shown)
    assert shown.endswith("(ulimit -f)")


def test_writes_that_outlive_orbax_s_event_loop_say_nothing(directory, monkeypatch, caplog):
    """With the first of many arrays that does not fit, the loop is closed beneath the others."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: told.append(error.exc_value))
    module._hush_orbax.cache_clear()  # as in a process that saves for the first time
    rows = np.random.default_rng(0).normal(size=(33, 100_000)).astype(np.float32)
    arrays = {str(number): jax.device_put(row) for number, row in enumerate(rows)}
    with contextlib.closing(Checkpoints(directory)) as checkpoints:
        for step in range(1, 7):
            with pytest.raises(DiskFull), limited_file_size(200_000):
                checkpoints.save(step, {}, arrays)
                checkpoints.wait()
    gc.collect()
    assert told == [] and [record for record in caplog.records if record.name == "asyncio"] == []
    late = ValueError('Failed writing: "run/checkpoints/1.orbax-checkpoint-tmp/d/1f": File too large')
    for error in (late, ValueError("another")):  # as asyncio tells of a future that nobody has waited for
        logging.getLogger("asyncio").error("Future exception was never retrieved", exc_info=(type(error), error, None))
    assert [record.exc_info[1].args for record in caplog.records if record.name == "asyncio"] == [("another",)]
    sys.unraisablehook(SimpleNamespace(exc_value=1, exc_traceback=None))  # anything else is told
    assert told == [1]
    module._hush_orbax.cache_clear()


def test_a_save_that_fails_leaves_room_for_the_next(directory, open_checkpoints):
    checkpoints = open_checkpoints()
    save(checkpoints, 1)
    with pytest.raises(CheckpointError, match=f"a checkpoint could not be written to {checkpoints.folder}"):
        checkpoints.save(2, STATE | {"notes": object()}, trees())
        checkpoints.wait()
    assert checkpoints.steps() == [1] and checkpoints.saved_step == 1
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 3] and checkpoints.saved_step == 3


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_what_is_in_the_way_of_a_step_is_named_and_kept(open_checkpoints, make):
    checkpoints = open_checkpoints()
    save(checkpoints, 1)
    make(checkpoints.folder / "2")
    with pytest.raises(CheckpointError, match=f"'{checkpoints.folder / '2'}' is no checkpoint of this run"):
        save(checkpoints, 2)
    assert os.path.lexists(checkpoints.folder / "2")
    save(checkpoints, 3)


def test_files_that_are_called_like_old_steps_are_left_alone(open_checkpoints):
    checkpoints = open_checkpoints()
    for name in ("0.old", "0.damaged", "1.damaged"):
        (checkpoints.folder / name).write_text("theirs")
    save(checkpoints, 1, 2, 3)
    assert all((checkpoints.folder / name).read_text() == "theirs" for name in ("0.old", "0.damaged", "1.damaged"))
    (checkpoints.folder / "3.damaged").write_text("theirs")
    with pytest.raises(RestoreError, match=f"'{checkpoints.folder / '3.damaged'}' is in the way"):
        checkpoints.set_aside(after=2)
    assert checkpoints.steps() == [2, 3]


def test_a_file_in_the_place_of_the_folder_is_named(directory):
    (directory.path / "checkpoints").write_text("theirs")
    with pytest.raises(RunDirectoryError, match=f"'{directory.path / 'checkpoints'}' is no folder"):
        Checkpoints(directory)


@pytest.mark.slow
def test_so_does_a_small_one(tmp_path, capsys):
    with small_disk(tmp_path / "disk", 4_000_000) as is_mounted:
        if not is_mounted:
            pytest.skip("no tmpfs can be mounted here")
        shown = fill(tmp_path / "disk" / "run", capsys, contextlib.nullcontext(), 1_000_000)
    assert re.search(r"/run/checkpoints/2' cannot be written: No space left on device; \d+ bytes are free", shown)

"""Runs held against reference histories: the band by hand, each verdict, and files of references."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from experiments.expected import REFERENCES, expected_band, judge, load_reference, main, make_reference
from jaxft.errors import ConfigError, RunDirectoryError
from jaxft.report.compared_runs import find_runs
from tests.report.compared import write_run

ROOT = Path(__file__).parents[1]
RATE = "trainer_adapters.local.optimizer.learning_rate"
EPOCHS = 40


def rewards(seed, shift=0.0, start=0):
    """A rising history with noise of its seed, shifted from an epoch on."""
    draw = random.Random(seed)
    return [epoch / EPOCHS + draw.gauss(0, 0.02) + (shift if epoch >= start else 0.0) for epoch in range(EPOCHS)]


def history_run(path, history, seed=0, **fields):
    """A finished run of the experiment."""
    settings = {"finetuning.num_epochs": EPOCHS, **fields.pop("settings", {})}
    return write_run(
        path, history, seed=seed, settings=settings, **{"result": {"win": 0.9 + seed % 5 / 1000}, **fields}
    )


@pytest.fixture
def reference(tmp_path):
    """A reference of seeds 0 to 4."""
    about = {"versions": {"jax": "1"}, "devices": ["cpu"], "command": ["game.py", "--overwrite", "--set", f"{RATE}=1"]}
    for seed in range(5):
        history_run(tmp_path / "made" / str(seed), rewards(seed), seed=seed, about=about)
    file = tmp_path / "game.json"
    file.write_text(json.dumps(make_reference("game", find_runs([f"{tmp_path}/made/*"])[0], tmp_path)))
    return load_reference(str(file))


def verdict(reference, path, history, **fields):
    history_run(path, history, **fields)
    return judge(find_runs([path])[0][0], reference)


def prediction_interval(values, level=0.95):
    """By scipy: the t interval of the mean of n values, wider by the root of n + 1."""
    mean, count = np.mean(values), len(values)
    low, high = scipy.stats.t.interval(level, count - 1, loc=mean, scale=scipy.stats.sem(values))
    return mean + (low - mean) * (count + 1) ** 0.5, mean + (high - mean) * (count + 1) ** 0.5


def test_the_band_holds_one_more_value_as_often_as_it_says():
    drawn = np.random.default_rng(0).normal(size=(6, 4000))
    low, high = np.transpose(expected_band(drawn[:5].tolist()))
    inside = (low <= drawn[5]) & (drawn[5] <= high)
    assert inside.mean() == pytest.approx(0.95, abs=3 * (0.95 * 0.05 / 4000) ** 0.5)


def test_the_band_is_the_interval_of_a_further_seed_at_each_epoch():
    band = expected_band([[0.0, 1.0], [0.2, 1.0], [0.1, 1.0]])
    assert band[0] == pytest.approx(prediction_interval([0.0, 0.2, 0.1]))
    # Equal rewards have no spread; the band is as wide as a hundredth of the span, 1.0, on each side.
    assert band[1] == pytest.approx((0.99, 1.01))
    assert expected_band([[math.nan], [1.0]]) == ((-math.inf, math.inf),)


def test_a_reference_keeps_seeds_rewards_settings_and_the_command(reference):
    assert [run.seed for run in reference.runs] == [0, 1, 2, 3, 4]
    assert reference.runs[2].rewards == pytest.approx(rewards(2), abs=1e-6)
    assert reference.runs[1].figures["result.win"] == 0.901
    assert "seconds" not in reference.runs[1].figures
    assert reference.command == f"python game.py --set {RATE}=1 --set finetuning.seed={{seed}}"
    assert reference.settings[RATE] == 0.001 and "finetuning.seed" not in reference.settings


@pytest.mark.parametrize("seed", range(5, 13))
def test_another_seed_is_as_expected(reference, tmp_path, seed):
    result = verdict(reference, tmp_path / "run", rewards(seed), seed=seed)
    assert result.is_expected and result.sentence.startswith("as expected")
    assert f"{sum(place != 'inside' for place in result.places)} of 40 epochs" in result.sentence
    assert "2.0 by chance" in result.sentence


@pytest.mark.parametrize(("shift", "word"), [(-0.3, "below"), (0.3, "above")])
def test_a_run_that_leaves_the_band_says_since_when(reference, tmp_path, shift, word):
    result = verdict(reference, tmp_path / "run", rewards(9, shift, start=20), seed=9)
    assert not result.is_expected and result.sentence.startswith(f"{word} since epoch 20: ")
    assert result.places[20:] == (word,) * 20


def test_a_run_that_is_outside_for_a_while_says_how_often(reference, tmp_path):
    history = rewards(9)
    history[5:20] = [-1.0] * 15
    result = verdict(reference, tmp_path / "run", history, seed=9)
    assert not result.is_expected and "below in 15 epochs from 5 to 19" in result.sentence


def test_a_final_figure_alone_makes_a_run_unexpected(reference, tmp_path):
    result = verdict(reference, tmp_path / "run", rewards(9), seed=9, result={"win": 0.2})
    assert not result.is_expected and "result.win 0.2 is below" in result.sentence
    (win,) = [each for each in result.figures if each.name == "result.win"]
    # Two figures are judged, each at 97.5 %.
    assert win.interval == pytest.approx(prediction_interval([0.9, 0.901, 0.902, 0.903, 0.904], 0.975), abs=0.01)


def test_rewards_that_are_missing_are_not_expected(reference, tmp_path):
    result = verdict(reference, tmp_path / "run", [None] * EPOCHS, seed=9)
    assert not result.is_expected and "without a finite reward since epoch 0" in result.sentence


def test_a_shorter_run_is_held_against_the_same_epochs(reference, tmp_path):
    settings = {"finetuning.num_epochs": 10}
    result = verdict(reference, tmp_path / "run", rewards(9)[:10], seed=9, settings=settings, result={"win": 0.1})
    assert result.is_expected and len(result.band) == 10
    assert result.differences == (("finetuning.num_epochs", "40", "10"),)
    assert "finetuning.num_epochs 10 instead of 40" in result.sentence
    assert [each.name for each in result.figures if each.place] == ["final_reward"]
    final = result.figures[0]
    assert final.references[0] == pytest.approx(sum(rewards(0)[7:10]) / 3, abs=1e-6)


def test_a_longer_run_is_held_against_the_epochs_that_there_are(reference, tmp_path):
    result = verdict(reference, tmp_path / "run", rewards(9) + [99.0] * 5, seed=9)
    assert result.is_expected and len(result.places) == EPOCHS


def test_runs_without_an_end(reference, tmp_path):
    going_on = verdict(reference, tmp_path / "a", rewards(9)[:20], seed=9, result=None)
    assert going_on.is_expected and "so far" in going_on.sentence
    failed = verdict(reference, tmp_path / "b", rewards(9)[:20], seed=9, result=None, log="ended: ValueError: no")
    assert not failed.is_expected and "failed after 20 epochs: ValueError: no" in failed.sentence
    assert not verdict(reference, tmp_path / "c", [], seed=9, result=None).is_expected


def test_settings_that_differ_qualify_and_another_experiment_is_not_expected(reference, tmp_path):
    result = verdict(reference, tmp_path / "a", rewards(9), seed=9, settings={RATE: 0.1})
    assert result.is_expected and f"{RATE} 0.1 instead of 0.001" in result.sentence
    rewritten = verdict(reference, tmp_path / "b", rewards(9), seed=9, settings={"workflow._type": "other"})
    assert rewritten.is_expected
    other = {"workflow._type": "other", "eval.general.dataset.file_path": "else.jsonl"}
    assert not verdict(reference, tmp_path / "c", rewards(9), seed=9, settings=other).is_expected
    silent = {"trainers.loop.save_episodes": 3, "finetuning.checkpoints": {"every": 7}}
    assert verdict(reference, tmp_path / "d", rewards(9), seed=9, settings=silent).differences == ()


def test_a_path_below_the_root_is_the_same_elsewhere(tmp_path):
    for seed in (0, 1):
        file = {"eval.general.dataset.file_path": f"{tmp_path}/one/data/train.jsonl"}
        history_run(tmp_path / f"r{seed}", rewards(seed), seed=seed, settings=file)
    runs, _ = find_runs([f"{tmp_path}/r*"])
    made = make_reference("game", runs, tmp_path / "one")
    assert made["settings"]["eval.general.dataset.file_path"] == "data/train.jsonl"
    (tmp_path / "game.json").write_text(json.dumps(made))
    elsewhere = {"eval.general.dataset.file_path": "/somewhere/data/train.jsonl"}
    reference = load_reference(str(tmp_path / "game.json"))
    assert verdict(reference, tmp_path / "new", rewards(9), seed=9, settings=elsewhere).differences == ()
    with pytest.raises(RunDirectoryError, match=r"train\.jsonl"):
        make_reference("game", runs, tmp_path / "two")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"result": None}, "unfinished"),
        ({"num_resumes": 1}, "resumed"),
        ({"settings": {RATE: 7}}, "learning_rate"),
        ({"history": [0.1] * 5}, "epochs"),
        ({"seed": 0}, "groups"),
    ],
)
def test_runs_that_are_no_reference(tmp_path, fields, match):
    history_run(tmp_path / "a", rewards(0), seed=0)
    history_run(tmp_path / "b", **{"history": rewards(1), "seed": 1, **fields})
    with pytest.raises(RunDirectoryError, match=match):
        make_reference("game", find_runs([f"{tmp_path}/*"])[0], tmp_path)


def test_unknown_names_and_other_files(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tic_tac_toe'"):
        load_reference("tic_tac_to")
    with pytest.raises(ConfigError, match="tic_tac_toe"):
        load_reference("zzz")
    for content in ("{}", "no json", '{"kind": "jaxft reference", "format_version": 2, "runs": [1]}', "[]"):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(RunDirectoryError, match=r"x\.json"):
            load_reference(str(tmp_path / "x.json"))
    with pytest.raises(RunDirectoryError, match=r"gone\.json"):
        load_reference(str(tmp_path / "gone.json"))


@pytest.mark.parametrize("name", sorted(file.stem for file in REFERENCES.iterdir()))
def test_references_of_the_experiments_are_whole_and_name_experiments(name):
    reference = load_reference(name)
    assert reference.experiment == name and len(reference.runs) >= 3
    assert {len(run.rewards) for run in reference.runs} == {reference.settings["finetuning.num_epochs"]}
    (begun,) = [word for word in reference.command.split() if word.endswith((".py", ".yml"))]
    assert (ROOT / begun).is_file()


def test_the_exit_code_says_whether_runs_are_as_expected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in range(5):
        history_run(tmp_path / f"made-{seed}", rewards(seed), seed=seed)
    assert main(["game.json", "made-*", "--make"]) == 0
    history_run(tmp_path / "good", rewards(9), seed=9)
    history_run(tmp_path / "low", rewards(9, -0.3), seed=9)
    assert main(["game.json", "good", "made-1"]) == 0
    said = capsys.readouterr().out
    assert "good is as expected: " in said and "made-1 is as expected: 0 of 40 epochs" in said
    assert main(["game.json", "good", "low", "nothing"]) == 1
    said = capsys.readouterr().out
    assert "low is below since epoch 0" in said and "left out: 'nothing'" in said and "final_reward" in said
    assert main(["game.json", "nothing"]) == main(["tic_tac_to", "good"]) == main(["a.json", "made-0", "--make"]) == 2
    assert "did you mean 'tic_tac_toe'" in capsys.readouterr().err

"""Figures of groups by hand, runs that do not count, and all that is said of them."""

import json
import math

import pytest

from jaxft.errors import RunDirectoryError
from jaxft.report.compare import comparison_page, default_folder, write_comparison
from jaxft.report.comparison import compare_runs, comparison_json
from jaxft.report.comparison_curves import group_curves
from jaxft.report.comparison_text import comparison_text
from tests.report.compared import write_rows, write_run

LOSS = "trainer_adapters.local.loss.name"


def write_sweep(folder, seeds=3, losses=("dapo", "grpo"), epochs=10):
    """Runs whose final reward is the seed / 10, and one more for the second loss."""
    for better, loss in enumerate(losses):
        for seed in range(seeds):
            rewards = [0.0] * (epochs - 3) + [better + seed / 10] * 3
            result = {"win_rate": 0.5 + seed / 10, "seconds": 30.0, "model": "model", "is_best": True}
            validations = [(0, -1.0), (5, better + 0.5), (10, better + 0.25)]
            path = folder / f"{loss}-{seed}"
            write_run(path, rewards, seed=seed, settings={LOSS: loss}, result=result, validations=validations)
    return f"{folder}/*"


def test_figures_are_means_over_seeds_with_intervals(tmp_path):
    comparison = compare_runs([write_sweep(tmp_path)])
    assert [group.name for group in comparison.groups] == ["loss.name=dapo", "loss.name=grpo"]
    assert comparison.last_epochs == 3
    dapo, grpo = comparison.figures["final_reward"]
    assert (dapo.mean, dapo.interval) == (pytest.approx(0.1), pytest.approx((0.0, 0.2)))
    assert grpo.mean == pytest.approx(1.1)
    assert comparison.figures["best_validation_reward"][1].values == (1.5, 1.5, 1.5)
    assert comparison.figures["best_validation_epoch"][1].mean == 5
    assert comparison.figures["validation.pass@4"][1].mean == 0.25  # of the best validation
    assert comparison.figures["seconds"][0].mean == 30
    assert comparison.figures["tokens_per_second"][0].mean == 50
    assert comparison.figures["result.win_rate"][0].values == (0.5, 0.6, 0.7)
    assert not {"result.seed", "result.model", "result.is_best"} & set(comparison.figures)


def test_the_order_of_runs_changes_nothing_but_their_groups_order(tmp_path):
    write_sweep(tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert comparison_json(compare_runs(paths)) == comparison_json(compare_runs(paths[::-1]))


def test_runs_without_an_end_are_counted_and_not_in_the_figures(tmp_path):
    write_sweep(tmp_path, losses=["dapo"], seeds=2)
    write_run(tmp_path / "failed", [9.0, None], seed=7, result=None, log="ended: ValueError: no <b>")
    write_run(tmp_path / "stopped", [9.0] * 4, seed=8, result=None, log="ended: interrupted; continue with:\n  x y")
    write_run(tmp_path / "resumed", [0.0] * 7 + [0.2] * 3, seed=9, num_resumes=2)
    write_run(tmp_path / "going_on", [9.0], seed=10, result=None, log="1/10 epochs")
    comparison = compare_runs([f"{tmp_path}/*"])
    (group,) = comparison.groups
    assert {run.records.name: run.status for run in group.runs if run.status != "finished"} == {
        "failed": "failed",
        "stopped": "unfinished",
        "going_on": "unfinished",
    }
    assert comparison.figures["final_reward"][0].values == pytest.approx((0.0, 0.1, 0.2))
    notes = "\n".join(comparison.notes)
    assert "ValueError: no <b>" in notes and "2 of 10 epochs" in notes and "resumed 2 times" in notes
    assert "3 finished, 1 failed, 2 unfinished, 1 resumed" in comparison_text(comparison)


def test_no_finished_run_gives_curves_and_no_figures(tmp_path):
    write_run(tmp_path / "a", [0.5, 0.6], result=None)
    write_run(tmp_path / "b", [], seed=1, result=None)
    comparison = compare_runs([f"{tmp_path}/*"])
    assert comparison.figures == {} and comparison.last_epochs == 2
    assert "b" in comparison_text(comparison) and "0.6" not in comparison_text(comparison)
    assert len(write_comparison(comparison, tmp_path / "out")) == 2


def test_one_run_is_a_group_of_its_name(tmp_path):
    write_run(tmp_path / "alone", [0.5])
    comparison = compare_runs([tmp_path / "alone"])
    assert [group.name for group in comparison.groups] == ["alone"]
    assert comparison.figures["final_reward"][0].interval is None


def test_no_run_is_an_error_that_names_every_path(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "sweep" / "one", [0.5])
    with pytest.raises(RunDirectoryError) as error:
        compare_runs([tmp_path / "empty", tmp_path / "gone", f"{tmp_path}/no*", tmp_path / "sweep"])
    for words in ("empty", "gone", "no*", f"{tmp_path}/sweep/*"):
        assert words in str(error.value)
    assert error.value.exit_code == 2


def test_what_is_no_run_is_named_beside_the_runs(tmp_path):
    pattern = write_sweep(tmp_path, seeds=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    write_run(tmp_path / "damaged", [0.5])
    (tmp_path / "damaged" / "training_metrics.jsonl").write_text('{"epoch": 0}\nnot json\n')
    write_run(tmp_path / "odd", [0.5])
    write_rows(tmp_path / "odd" / "timings.jsonl", [[1, 2]])
    write_comparison(compare_runs([tmp_path / "dapo-0"]), tmp_path / "compare")
    comparison = compare_runs([pattern, tmp_path / "dapo-0"])
    assert len(comparison.runs) == 2
    reasons = {each.path.rsplit("/", 1)[-1]: each.reason for each in comparison.left_out}
    assert set(reasons) == {"*", "compare", "empty", "damaged", "odd", "dapo-0"}
    assert "training_metrics.jsonl:2" in reasons["damaged"] and "1 file" in reasons["*"]
    assert all(words in comparison_text(comparison) for words in ("empty", "damaged", "twice"))


def test_rewards_that_are_no_numbers_leave_gaps(tmp_path):
    write_run(tmp_path / "a", [0.1, None, 0.3, 0.3, 0.3])
    write_run(tmp_path / "b", [0.1, 0.2, 0.3, None, 0.3], seed=1)
    comparison = compare_runs([f"{tmp_path}/*"])
    assert comparison.figures["final_reward"][0].values == pytest.approx((0.3,))
    assert str(tmp_path / "b") in "".join(comparison.notes)
    means = group_curves(comparison.groups[0], "reward_mean").means
    assert [math.isnan(y) for y in means] == [False, True, False, True, False]
    json.dumps(comparison_json(comparison), allow_nan=False)


def test_runs_of_other_lengths_share_the_epochs_of_the_shortest(tmp_path):
    write_run(tmp_path / "a", [0.0] * 30)
    write_run(tmp_path / "b", [1.0] * 50, seed=1)
    comparison = compare_runs([f"{tmp_path}/*"])
    curves = group_curves(comparison.groups[0], "reward_mean")
    assert (comparison.last_epochs, curves.epochs) == (3, list(range(30)))
    assert set(curves.means) == {0.5} and set(curves.lows) == {0.0} and set(curves.highs) == {1.0}
    assert "from 30 to 50" in "".join(comparison.notes)


def test_figures_of_some_runs_are_said(tmp_path):
    write_run(tmp_path / "a", [0.5], result={"win": 1.0})
    write_run(tmp_path / "b", [0.5], seed=1)
    comparison = compare_runs([f"{tmp_path}/*"])
    assert comparison.figures["result.win"][0].values == (1.0,)
    assert "result.win is in 1 of 2" in "\n".join(comparison.notes)


def test_a_metric_that_no_run_has_is_not_drawn(tmp_path):
    runs = [write_run(tmp_path / str(seed), [0.1, 0.2], seed=seed, metrics={"entropy": 1.5}) for seed in (0, 1)]
    page = comparison_page(compare_runs(runs))
    assert "entropy, nats per token" in page and "KL to the reference" not in page and "no values yet" not in page


@pytest.mark.slow
def test_two_hundred_runs_are_compared(tmp_path):
    for number in range(200):
        rewards = [number / 200] * 10
        rate = {"trainer_adapters.local.optimizer.learning_rate": number // 4}
        write_run(tmp_path / f"{number}", rewards, seed=number % 4, settings=rate)
    comparison = compare_runs([f"{tmp_path}/*"])
    assert len(comparison.groups) == 50
    text = comparison_text(comparison)
    assert max(map(len, text.splitlines())) <= 120 and "learning_rate=49" in text
    page = comparison_page(comparison)
    assert "8 groups of 50" in page and len(page) < 2_000_000


def test_names_with_markup_stay_text(tmp_path):
    name = "<script>alert(1)</script>$x^$"
    write_run(tmp_path / "a", [0.5, 0.6], settings={LOSS: name})
    write_run(tmp_path / "_b", [0.5, 0.6], settings={LOSS: "b\x1b[31m\nc"})
    comparison = compare_runs([f"{tmp_path}/*"])
    page = (write_comparison(comparison, tmp_path / "out")[1]).read_text()
    assert "&lt;script&gt;" in page and "<script>alert" not in page and "\x1b" not in page


def test_runs_in_different_folders_are_compared_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "x" / "a", [0.5])
    write_run(tmp_path / "y" / "b", [0.5], seed=1)
    assert str(default_folder(compare_runs(["x/a", "y/b"]).runs)) == "runs/compare"

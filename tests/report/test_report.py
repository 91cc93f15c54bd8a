"""The page that `jaxft report` writes, read as a browser without scripts reads it."""

import asyncio
import base64
import json
import random
import re
import zlib
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from jaxft.cli import main
from jaxft.errors import RunDirectoryError
from jaxft.report.episodes import make_archive
from jaxft.report.report import watch, write_report
from jaxft.report.samples import find_episodes, read_episodes
from jaxft.runs.directory import RunDirectory
from jaxft.runs.records import read_run
from tests.report.made_runs import episode, make_dpo_run, make_run, message, write_json, write_lines

VOID = ("input", "meta")
"""Elements of the pages that have no end."""


class Page(HTMLParser):
    """A parsed page: its elements in order, the text of each section, and whether its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.sections: dict[str, str] = {}
        self.faults: list[str] = []
        self._open: list[str] = []
        self._section: str | None = None
        self.feed(html)
        self.close()
        if self._open:
            self.faults.append(f"not closed: {self._open}")

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("section", "header"):
            self._section = dict(attrs).get("id")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        if not self._open or self._open[-1] != tag:
            self.faults.append(f"</{tag}> after {self._open[-1:]} at {self.getpos()}")
        else:
            self._open.pop()

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("script", "style"):
            self.text += data
            if self._section:
                self.sections[self._section] = self.sections.get(self._section, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(run: Path, **options) -> Page:
    return Page(write_report(run, **options).path.read_text("utf-8"))


def episodes_of(page: Page) -> list[str]:
    """The HTML of all episodes in the page's blocks."""
    blocks = re.findall(r'id="block-\d+">([^<]*)<', page.html)
    return [each for block in blocks for each in unpacked(block).split("\x1e")]


def unpacked(data: str) -> str:
    return zlib.decompress(base64.b64decode(data)).decode()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run<1>")


@pytest.fixture(scope="module")
def page(run):
    return page_of(run)


def test_the_page_is_well_formed_and_loads_nothing(page):
    assert page.faults == []
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
        assert "style" not in attributes  # which the policy forbids
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"@import|url\(", page.html)
    policy = next(each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy


def test_the_page_shows_the_figures_of_the_run(page, run):
    last = json.loads((run / "reward_history.json").read_text())[-1]["reward_mean"]
    header = page.sections["top"]
    assert f"{last:.3g}" in header and "run<1>" in header and "ended" in header
    assert "win rate" in header and "0.75" in header  # of result.json
    assert "cpu (cpu 0)" in header and "jax 0.10.2" in header and "--set finetuning.seed=3" in header
    assert "Entropy" in page.sections["curves"] and "own/<metric>" in page.sections["curves"]
    curves = page.sections["curves"]
    assert "mean as trained" in curves and f"{2 * last:.4g}" in curves and "The evaluator's rewards" in curves
    assert "Hardest examples" in page.sections["rewards"] and "example-2" in page.sections["rewards"]
    assert "Curriculum" in page.sections["validation"] and "avg_reward" in page.sections["validation"]
    validation = page.sections["validation"]
    assert "Validation: pass@k, maj@k and best@k" in validation and "level=hard/reward" in validation
    assert "Validation rewards by name" in validation and "Validation reward by level" in validation
    assert "rollout" in page.sections["timings"] and "host peak: 1 GiB" in page.sections["timings"]
    assert re.search(r"finetuning\.seed\s*3\s*0", page.sections["configuration"])
    assert "preset: qwen3-1m" in page.sections["configuration"]
    faults = page.sections["faults"]
    assert "ValueError: <b>no</b>" in faults and "finetuning.num_epochs: 4 → 6" in faults and "<i>careful</i>" in faults


def test_named_rewards_stand_beside_the_reward(page, tmp_path):
    header = page.sections["top"]
    assert re.search(r"brief, last epoch\s*0\.875\s*0\.25 in the first", header) and "brief first" not in header
    assert "Rewards by name" in page.sections["curves"] and page.sections["curves"].count("reward/") == 0
    run = make_run(tmp_path / "run", epochs=3)
    rows = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    write_lines(run / "training_metrics.jsonl", [row | {"reward/brief": row["reward_mean"]} for row in rows])
    assert "Rewards by name" not in page_of(run).text  # they are the reward


def test_examples_have_their_questions(page, run):
    question = json.loads((run / "trajectories/samples.jsonl").read_text().splitlines()[0])["episode"][1]["content"]
    assert f"example-0{question}" in page.sections["rewards"]
    assert all("→" in html for html in episodes_of(page) if "badge error" not in html)


def test_phases_are_without_the_epochs_that_compile(page, run):
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    warm = [row for row in rows if row["epoch"] not in (0, 2)]  # it was resumed at 2
    assert f"update {warm[0]['seconds_update']:.4g}" in page.sections["timings"]
    assert "epochs 0, 2, in which" in page.sections["timings"]


def test_what_a_run_does_not_have_is_not_shown_and_the_curriculum_of_a_task_is(tmp_path):
    run = make_run(tmp_path / "run", epochs=3)
    environment = json.loads((run / "environment.json").read_text())
    write_json(run / "environment.json", environment | {"git_commit": None, "devices": []})
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    write_lines(run / "timings.jsonl", [row | {"host_peak_bytes": None, "compiles": None} for row in rows])
    validations = json.loads((run / "validation_history.json").read_text())
    write_json(run / "validation_history.json", [{"epoch": row["epoch"], "avg_reward": None} for row in validations])
    config = yaml.safe_load((run / "config.yml").read_text())
    words = {"curriculum_learning": config["finetuning"].pop("curriculum_learning")}
    config["finetuning"]["per_task"] = {"sums": {"curriculum_learning": None}, "words": words}
    (run / "config.yml").write_text(yaml.safe_dump(config))
    page = page_of(run)
    assert not {"Commit", "Devices", "–"} & set(page.sections["top"].split())
    assert "Curriculum, % of the groups" in page.text  # of a task
    assert "Memory, GiB" not in page.text and "Compiled programs" not in page.text
    assert "Validation reward" not in page.text


def test_a_chart_says_its_values_on_hover(page, run):
    rows = json.loads((run / "reward_history.json").read_text())
    words = next(
        each
        for each in re.findall(r"<title>([^<]*)</title>", page.html)
        if each.startswith("epoch, counted from 0 4\n")
    )
    assert f"mean {rows[4]['reward_mean']:.4g}" in words
    assert f"lowest to highest {rows[4]['reward_min']:.4g} to {rows[4]['reward_max']:.4g}".replace("1.0", "1") in words


def test_every_sampled_token_carries_its_numbers(page, run):
    rows = {
        (row["epoch"], row["example_id"], row["generation"]): row
        for row in read_episodes(find_episodes(run))
        if "failure" not in row
    }
    shown = episodes_of(page)
    assert len(shown) == len(rows) + 1  # and the report of a failed one
    for html, row in zip((each for each in shown if "ValueError" not in each), rows.values(), strict=True):
        tokens = re.findall(r'<span class="t [^"]*" tabindex=0 data-a=(\S+) data-l=(\S+) data-e=([^>]+)>', html)
        mask = row["sequences"][0]["completion_mask"]
        columns = (row["advantages"][0], row["sequences"][0]["sampler_logprobs"], row["entropies"][0])
        wanted = [values for sampled, *values in zip(mask, *columns, strict=True) if sampled]
        assert [[float(value) for value in token] for token in tokens] == [
            [float(f"{value:.4g}") for value in values] for values in wanted
        ]
    assert "finish: stop" in shown[0] and "calls a tool" in shown[0] and "tool result" in shown[0]


def test_a_carried_episode_ends_beside_a_new_one_of_its_example(tmp_path):
    run, made = make_run(tmp_path / "x", epochs=1), random.Random(1)
    pairs = [episode(made, 0, "a", 0, tokens) for tokens in (6, 20)]
    rows, scores = zip(*[[each | {"rollout_index": i} for each in pair] for i, pair in enumerate(pairs)], strict=True)
    write_lines(run / "trajectories/samples.jsonl", rows)
    write_lines(run / "trajectories/token_scores.jsonl", scores[::-1])
    for found in (list(read_episodes(find_episodes(run))), list(read_run(run).episodes())):
        assert [row["advantages"] for row in found] == [score["advantages"] for score in scores]
    assert len(episodes_of(page_of(run))) == 2


def test_the_first_page_needs_no_script(page):
    listed = [each for each in page.all("details") if each.get("class") == "episode"]
    assert len(listed) == 20 and ["open" in each for each in listed].count(True) == 1
    assert "epoch 5" in page.sections["episodes"]
    assert [each["id"] for each in page.all("input") if each.get("name") == "shade"] == [
        "shade-a", "shade-l", "shade-e", "shade-0"
    ]  # fmt: skip


def test_the_index_agrees_with_the_blocks(page):
    index = json.loads(unpacked(re.search(r'id="episode-index">([^<]*)<', page.html)[1]))
    shown = episodes_of(page)
    assert sum(index["blocks"]) == len(shown) == len(index["epochs"])
    for number, html in enumerate(shown):
        assert f"epoch {index['epochs'][number]}<" in html
        assert f"<b>{index['names'][index['examples'][number]]}</b>" in html


HOSTILE = "</script><script>alert(1)</script><!-- \u202eevil\u2069 \x00 \x1b[31m &amp; \u200b end  \n\tx"


def test_hostile_text_is_text(tmp_path):
    run = make_run(tmp_path / "x", epochs=1, examples=1, generations=1)
    row, scores = episode(random.Random(1), 0, HOSTILE, 0, 6)
    row["episode"][1] = message("user", HOSTILE + "\ud800")
    row["token_texts"][0][3:5] = [HOSTILE, "\udce9"]
    row["metadata"] |= {"error": HOSTILE, "reasoning": HOSTILE}
    row["named_rewards"] = {HOSTILE: 1.0}
    long = "a" * 100_000
    other = {
        **row,
        "episode": [message("user", long), message("wizard\"'>", "b")],
        "sequences": None,
        "token_texts": None,
    }
    write_lines(run / "trajectories/samples.jsonl", [row, other, {"epoch": 0, "failure": HOSTILE}])
    write_lines(run / "trajectories/token_scores.jsonl", [scores])
    write_lines(run / "trajectories/rewards.jsonl", [{"epoch": 0, "rewards": {HOSTILE: [0.5]}}])
    (run / "run.log").write_text("2026-01-01 00:00:00 WARNING " + HOSTILE)
    page = page_of(run)
    assert page.faults == [] and len(page.all("script")) == 2 + 2  # the page's two, the index, and one block
    assert "\x00" not in page.html and "\x1b" not in page.html
    assert page.html.count("</script><script>alert") == 0
    assert page.text.count("</script><script>alert(1)</script><!--") >= 8
    assert 'data-c="U+202E"' in page.html and "␀" in page.text and "\\ud800" in page.text
    shown = episodes_of(page)
    for html in shown:
        assert Page(html).faults == []
    assert "80,000 more characters" in shown[1] and shown[1].count("a" * 1000) == 20


def test_an_older_run_is_shown_without_shades(tmp_path):
    run = make_run(tmp_path / "x", epochs=2)
    file = run / "trajectories/samples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for name in ("token_scores.jsonl", "rewards.jsonl"):
        (run / "trajectories" / name).unlink()
    environment = json.loads((run / "environment.json").read_text())
    del environment["differences"]
    write_json(run / "environment.json", environment)
    radios = {each["id"]: each for each in page_of(run).all("input") if each.get("name") == "shade"}
    assert "disabled" in radios["shade-a"] and "checked" in radios["shade-l"] and "disabled" in radios["shade-e"]
    for row in rows:
        del row["token_texts"]
    write_lines(file, rows)
    page = page_of(run)
    assert page.faults == [] and 'class="t ' not in page.html and "Tokens are not shaded" in page.text
    assert "You add numbers." in page.sections["episodes"]
    assert "older runs do" in page.sections["rewards"]
    assert "older runs" in page.sections["configuration"]


def test_the_overlap_of_rollouts_and_updates_is_shown(tmp_path):
    run = make_run(tmp_path / "run", epochs=4)
    for file, added in (
        ("training_metrics.jsonl", {"staleness/0": 0.25, "staleness/1": 0.75}),
        ("timings.jsonl", {"seconds_device_sampling": 1.5, "seconds_device_idle": 0.5, "seconds_episode_max": 3.0}),
    ):
        rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
        changing = {"effective_sample_fraction": 0.9} if file.startswith("training") else {}
        for row in rows:
            row |= added | {name: value - row["epoch"] / 100 for name, value in changing.items()}
        write_lines(run / file, rows)
    page = page_of(run)
    assert page.faults == []
    for caption in ("Tokens by the number of versions behind", "Effective sample size of the importance weights"):
        assert caption in page.sections["curves"]
    assert "Seconds of the device" in page.sections["timings"]
    assert "Seconds of the longest episode" in page.sections["timings"]


def test_pairs_of_dpo_are_shown(tmp_path):
    page = page_of(make_dpo_run(tmp_path / "x"))
    assert page.faults == [] and "5 preference pairs" in page.sections["episodes"]
    assert re.search(r"chosen\s*this\s*rejected\s*that", page.sections["episodes"])


def test_a_run_without_an_epoch_has_a_page(tmp_path):
    (tmp_path / "config.yml").write_text("finetuning: {num_epochs: 3}\n")
    page = page_of(tmp_path)
    assert page.faults == [] and "No epoch has ended yet." in page.text and "stopped" in page.sections["top"]


def test_a_run_that_goes_on_is_shown_and_loads_itself_again(tmp_path):
    run = make_run(tmp_path / "x", has_ended=False)
    with (run / "trajectories/samples.jsonl").open("a") as stream:
        stream.write('{"epoch": 6, "episode": [{"ro')  # half of a line
    with RunDirectory.create(tmp_path / "other"):
        pass
    (run / "LOCK.holder").write_text((tmp_path / "other/LOCK.holder").read_text())
    with RunDirectory.open(run):
        page = page_of(run, refresh_seconds=7)
        assert "running" in page.sections["top"] and "jaxft resume runs/x" in page.sections["top"]
        assert [each["content"] for each in page.all("meta") if each.get("name") == "refresh-seconds"] == ["7"]
    stopped = page_of(run, refresh_seconds=7)
    assert "stopped before its end" in stopped.sections["top"]
    assert not [each for each in stopped.all("meta") if each.get("name") == "refresh-seconds"]


def test_watching_ends_with_the_run(tmp_path):
    run = make_run(tmp_path / "x", has_ended=False)
    (run / "LOCK.holder").write_text("{}")
    said: list[str] = []

    async def follow():
        with RunDirectory.open(run):
            watching = asyncio.create_task(watch(partial(write_report, run), said.append, 0.01))
            while not said and not watching.done():
                await asyncio.sleep(0.01)
            samples = run / "trajectories/samples.jsonl"
            whole = samples.read_bytes()
            samples.write_bytes(b"garbage\n")  # as of a run that is being overwritten
            while "samples.jsonl:1" not in said[-1] and not watching.done():
                await asyncio.sleep(0.01)
            samples.write_bytes(whole)
            write_json(run / "result.json", {"seconds": 1.0})
            return await watching

    written = asyncio.run(follow())
    assert written.state == "ended" and "refresh-seconds" not in re.findall("<meta[^>]*>", written.path.read_text())


@pytest.mark.parametrize(
    "name", ["training_metrics.jsonl", "timings.jsonl", "trajectories/samples.jsonl", "trajectories/rewards.jsonl"]
)
@pytest.mark.parametrize("damage", [b"{\n", b"[1]\n", b'{"epoch": 0, "x": \x00}\n', b'{"x": 1}\n'])
def test_a_damaged_line_is_named(tmp_path, name, damage):
    run = make_run(tmp_path / "x", epochs=3)
    file = run / name
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
    with pytest.raises(RunDirectoryError, match=re.escape(f"{name}:2")):
        write_report(run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("name", ["environment.json", "validation_history.json", "result.json", "config.yml"])
@pytest.mark.parametrize("damage", [b"{", b"7", b'[{"x": 1}]'])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    run = make_run(tmp_path / "x", epochs=1)
    (run / name).write_bytes(damage)
    with pytest.raises(RunDirectoryError, match=re.escape(name)):
        write_report(run)


def test_more_episodes_than_are_kept_are_counted(tmp_path):
    run = make_run(tmp_path / "x", epochs=5, examples=4, generations=5)
    page = page_of(run, max_episodes=30)
    assert "30 of 101 episodes" in page.sections["episodes"]
    index = json.loads(unpacked(re.search(r'id="episode-index">([^<]*)<', page.html)[1]))
    assert {index["epochs"].count(epoch) for epoch in range(5)} == {6}
    places = find_episodes(run)
    small = make_archive(places, max_episodes=1000, max_bytes=8000)
    assert 0 < small.num_shown < 101 and sum(map(len, small.blocks)) <= 8000
    assert {entry.epoch for block in small.entries for entry in block} == set(range(5))


def test_an_ordinary_run_is_a_small_file(tmp_path):
    run = make_run(tmp_path / "x", epochs=90, examples=3, generations=1, tokens=40)
    assert write_report(run).num_bytes < 2_000_000


@pytest.mark.slow
def test_ten_thousand_episodes_are_one_file_of_moderate_size(tmp_path):
    run = make_run(tmp_path / "x", epochs=50, examples=20, generations=10, tokens=60)
    written = write_report(run)
    assert written.num_episodes == 10_000 and written.num_bytes < 20_000_000


def test_the_command_writes_the_page(tmp_path, capsys):
    run = make_run(tmp_path / "x", epochs=1)
    assert main(["report", str(run)]) == 0
    assert f"{run / 'report.html'}" in capsys.readouterr().out
    other = tmp_path / "other.html"
    assert main(["report", str(run), "--output", str(other)]) == 0 and other.is_file()
    assert main(["report", str(tmp_path)]) == 2
    assert "config.yml" in capsys.readouterr().err
    assert main(["report", str(run), "--output", str(tmp_path / "none/x.html")]) == 2
    assert str(tmp_path / "none/x.html") in capsys.readouterr().err


def test_an_overwritten_run_loses_its_report(tmp_path):
    run = make_run(tmp_path / "x", epochs=1)
    (run / "LOCK.holder").write_text("{}")
    write_report(run)
    with RunDirectory.create(run, overwrite=True) as directory:
        directory.write_text("config.yml", "{}")
        assert not (run / "report.html").exists()

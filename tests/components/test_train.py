"""Runs of `jaxft.train` with a tiny model; all have the shapes of `examples/ten_lines.py` with four prompts."""

import asyncio
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
import yaml

import jaxft
from jaxft.components.train import DEFAULTS
from jaxft.errors import ConfigError, DatasetError, RunDirectoryError, Stopped, TooManyFailures
from jaxft.harness.config import config_from_mapping, resolved_yaml
from jaxft.harness.signals import current_shutdown
from tests import own_functions

TEN_LINES = Path(__file__).parents[2] / "examples" / "ten_lines.py"
PROMPTS, ANSWERS = [f"number {i}?" for i in range(4)], list("0123")
RECORDED = {"optimizer": {"learning_rate": 1e-5}}
OPTIONS = {"num_epochs": 3, "learning_rate": 1e-2, "max_completion_length": 8}
OWN = {
    "loss": own_functions.pull,
    "advantages": "tests.own_functions:above_mean",
    "optimizer": own_functions.sign_descent,
    "reward_weights": [0.75, 0.25],
    "on_trajectories": own_functions.count_groups,
    "on_epoch_end": own_functions.count_metrics,
}


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in each) / 8 for each in completions]


async def right(completion, answer):
    return completion.count(answer) / 8 if completion else None


def metrics_of(folder):
    return (folder / "training_metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "whole"
    return jaxft.train("qwen3-50k", [digits, right], PROMPTS, output_dir=folder, answer=ANSWERS, **OPTIONS, **OWN)


def resolved(optimizer=None, loss="dapo", recorded=None, **policy):
    """Return the configuration, in YAML, of a run with this policy; `recorded` is the adapter of an earlier one."""
    mapping = yaml.safe_load(DEFAULTS.read_text("utf-8"))
    mapping["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "rows.jsonl"}
    mapping["eval"]["evaluators"]["reward"]["functions"] = [digits]
    mapping["llms"]["policy"] |= policy
    mapping["trainer_adapters"]["local"] |= {"optimizer": optimizer or {}, "loss": {"name": loss}}
    if loss == "dpo":
        mapping["trajectory_builders"]["rollouts"] = {"_type": "dpo_trajectory_builder"}
    config = config_from_mapping(mapping, base_dir=".")
    config.resolve({"trainer_adapters": {"local": recorded or {}}})
    return resolved_yaml(config)


def adapter(**options):
    return yaml.safe_load(resolved(**options))["trainer_adapters"]["local"]


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"preset": "qwen3-50k"}, 3e-3),
        ({"preset": "qwen3-50k", "lora": {}}, 3e-3),
        ({"path": "some/model"}, 1e-6),
        ({"path": "some/model", "lora": {}}, 1e-5),
        ({"path": "some/model", "lora": {}, "loss": "dpo"}, 1e-5),
        ({"path": "some/model", "loss": "sft"}, 1e-5),
        ({"path": "some/model", "loss": "sft", "lora": {}}, 1e-4),
        ({"path": "some/model", "optimizer": {"learning_rate": 2e-4}}, 2e-4),
        ({"path": "some/model", "optimizer": {"learning_rate": None}}, 1e-6),
        ({"path": "some/model", "optimizer": {"function": "optax:adamw"}}, 1e-6),
        ({"path": "some/model", "optimizer": {"function": "optax:identity"}}, None),
        (
            {
                "path": "some/model",
                "optimizer": {"schedule": "tests.own_functions:halving", "schedule_options": {"every": 2}},
            },
            1e-6,
        ),
        # A run that is continued: its rate, unless another one is given.
        ({"path": "some/model", "recorded": RECORDED}, 1e-5),
        ({"path": "some/model", "recorded": RECORDED, "optimizer": {"learning_rate": 2e-4}}, 2e-4),
    ],
)
def test_the_learning_rate_is_that_of_the_weights_unless_one_is_given(options, expected):
    assert adapter(**options)["optimizer"]["learning_rate"] == expected


def test_a_run_keeps_its_values_or_names_those_that_are_none():
    other = {"path": "some/model", "optimizer": {"function": "optax:identity"}}
    assert adapter(**other)["microbatch_tokens"] is None
    assert adapter(**other, recorded={"microbatch_tokens": 8192})["microbatch_tokens"] == 8192
    place = "^config.yml: trainer_adapters.local"
    with pytest.raises(ConfigError, match=rf"{place}.optimizer.learning_rate: must be greater than 0$"):
        adapter(path="some/model", recorded={"optimizer": {"learning_rate": -1}})
    with pytest.raises(ConfigError, match=rf"{place}.microbatch_tokens: must be .*holds a text\)$"):
        adapter(path="some/model", recorded={"microbatch_tokens": "many"})


def test_the_result_has_history_plot_and_model(whole):
    assert [row["epoch"] for row in whole.history] == [0, 1, 2]
    for row in whole.history:
        assert {"reward/digits", "reward/right", "strength", "own_metrics"} <= row.keys() and row["episodes"] == 32
        assert row["own_groups"] == 4 and row["own_epoch"] == row["epoch"]
    assert whole.rewards == [row["reward_mean"] for row in whole.history]
    assert whole.plot()._repr_png_().startswith(b"\x89PNG")
    assert whole.final["reward_last"] == whole.rewards[-1] and whole.final["num_epochs"] == 3
    assert whole.final["reward/digits_best"] == max(row["reward/digits"] for row in whole.history)
    assert repr(whole).startswith(f"TrainResult('{whole.output_dir}': 3 epochs, reward {whole.rewards[0]:.3f} -> ")
    assert repr(jaxft.TrainResult(str(whole.output_dir))) == repr(whole)
    card = (whole.output_dir / "model" / "README.md").read_text()
    assert "| loss | `tests.own_functions:pull` |" in card and "- function\n" not in card
    model, params = whole.load()
    before = jaxft.init_model("qwen3-50k", jax.random.key(0, impl="threefry2x32"))[1]
    assert model.config.num_layers == 2
    assert not np.array_equal(jax.tree.leaves(params)[0], jax.tree.leaves(before)[0])


def test_the_configuration_of_the_run_names_the_functions(whole):
    config = yaml.safe_load((whole.output_dir / "config.yml").read_text())
    assert config["eval"]["evaluators"]["reward"]["functions"] == [f"{__name__}:digits", f"{__name__}:right"]
    assert config["eval"]["general"]["dataset"] == {"_type": "in_memory"}
    assert config["llms"]["policy"]["max_context_tokens"] == 32 and config["llms"]["policy"]["slots"] == 32


def test_a_run_interrupted_in_a_notebook_goes_on_as_if_nothing_had_happened(whole, tmp_path):
    """An event loop runs already; SIGINT comes in the second epoch."""
    folder, calls = tmp_path / "interrupted", []

    def train(reward, **options):
        return jaxft.train(
            "qwen3-50k", [reward, right], PROMPTS, output_dir=folder, answer=ANSWERS, **OPTIONS | OWN | options
        )

    def interrupting(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 60
            while current_shutdown().signal is None and time.monotonic() < deadline:  # a busy machine hears it late
                time.sleep(0.01)
        return digits(completions)

    interrupting.__name__ = "digits"

    async def notebook(reward, **options):
        return train(reward, **options)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped) as caught:
        asyncio.run(notebook(interrupting))
    # An update that has begun is finished first.
    step = re.search(r"checkpoint ([12])\b", str(caught.value))
    assert step and f"jaxft.train(..., output_dir='{folder}', resume=True)" in str(caught.value)
    assert signal.getsignal(signal.SIGINT) is before and len(metrics_of(folder).splitlines()) == int(step[1])
    own = r"loss.function: was tests.own_functions:pull@\w+ and is tests.own_functions:with_reference@\w+: to go on"
    with pytest.raises(ConfigError, match=own):
        train(digits, resume=True, loss=own_functions.with_reference, beta=0.1)
    # None is the recorded rate, as for a run of an earlier version with another default.
    result = asyncio.run(notebook(digits, resume=True, learning_rate=None))
    assert metrics_of(folder) == metrics_of(whole.output_dir) and len(result.history) == 3
    with pytest.raises(RunDirectoryError, match="interrupted"):  # it holds a run, which nothing overwrites
        train(digits)


def test_the_ten_lines_are_ten_and_run(whole, tmp_path, monkeypatch, capsys):
    text = TEN_LINES.read_text()
    assert len(text.splitlines()) <= 10 and text.isascii()
    script = tmp_path / "ten_lines.py"
    shrunk = text.replace("range(16)", "range(4)")
    script.write_text(re.sub(r"num_epochs=\d+", "num_epochs=1", shrunk))
    assert script.read_text() != shrunk != text
    (tmp_path / "runs" / "train-1").mkdir(parents=True)  # somebody else's
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path(str(script))["result"]
    assert result.output_dir == Path("runs/train-2") and not any(Path("runs/train-1").iterdir())
    shown = capsys.readouterr().out
    assert "1/1 epochs  reward" in shown and "runs/train-2/reward_plot.png" in shown.splitlines()[-1]


SAVES, ADAPTERS = {"trainers.loop.save_episodes": "all"}, {"llms.policy.lora.rank": 2}


@pytest.mark.parametrize("overrides", [SAVES, pytest.param(SAVES | ADAPTERS, marks=pytest.mark.slow)])
def test_chats_and_overrides(whole, tmp_path, overrides):
    seen = []

    def reward(prompts, completions, completion_ids):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [len(each[0]["content"]) for each in completions]

    chats = [[{"role": "user", "content": f"no {i}?"}] for i in range(4)]
    result = jaxft.train(
        "qwen3-50k", reward, chats, output_dir=tmp_path / "chats", overrides=overrides, **OPTIONS | {"num_epochs": 1}
    )
    assert len(seen) == 32
    prompt, completion, ids = seen[0]
    assert prompt == chats[0] and completion[0]["role"] == "assistant" and 1 <= len(ids) <= 8
    config = yaml.safe_load((result.output_dir / "config.yml").read_text())
    assert config["trainers"]["loop"]["save_episodes"] == "all"
    model, params = result.load()  # any adapters are merged
    assert model.lora is None and "base" not in params


def test_a_reward_that_fails_ends_the_run_with_function_file_and_line(tmp_path):
    def faulty(completion):
        return {}["score"]

    with pytest.raises(TooManyFailures) as caught:
        jaxft.train("qwen3-50k", faulty, PROMPTS, output_dir=tmp_path / "faulty", **OPTIONS)
    first = faulty.__code__.co_firstlineno
    assert f"'faulty' ({__file__}:{first}) raised KeyError: 'score', at {__file__}:{first + 1} in faulty" in str(
        caught.value
    )


RECORD = NamedTuple("Optimizer", [("init", int), ("update", int)])(1, 2)  # as optax has it


def test_wrong_arguments_are_refused_at_the_door_and_leave_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, options, error, shown in [
        (("qwen3-50", digits, PROMPTS), {}, ConfigError, "did you mean 'qwen3-50k'"),
        (("no-such-folder", digits, PROMPTS), {}, ConfigError, "qwen3-50k, qwen3-58m"),
        (("./no/such/folder", digits, PROMPTS), {}, ConfigError, "'./no/such/folder'"),
        (("qwen3-50k", "digits", PROMPTS), {}, ConfigError, "reward: 'digits'"),
        (("qwen3-50k", right, PROMPTS), {}, ConfigError, "takes 'answer'"),
        (("qwen3-50k", digits, []), {}, DatasetError, "prompts"),
        (("qwen3-50k", digits, PROMPTS), {"validation": ["a", ""]}, DatasetError, r"validation\[1\] is ''"),
        (("qwen3-50k", digits, PROMPTS), {"num_epoch": 3}, ConfigError, "num_epoch: .* did you mean 'num_epochs'"),
        (("qwen3-50k", digits, PROMPTS), {"max_tokens": 8}, ConfigError, "max_tokens: is no keyword"),
        (
            ("qwen3-50k", digits, ["a"] * 2),
            {"optimizer": RECORD},
            ConfigError,
            r"local.optimizer.function: \[1, 2\] is no function",
        ),
        (("qwen3-50k", digits, PROMPTS), {"num_generations": 1}, ConfigError, "num_generations: is 1"),
        (("qwen3-50k", digits, PROMPTS), {"reward_weights": [1, 2]}, ConfigError, "is a number for each of digits"),
        (("qwen3-50k", digits, PROMPTS), {"loss": "tests.own_functions:pul"}, ConfigError, "mean 'pull'"),
        (("qwen3-50k", digits, PROMPTS), {"loss": own_functions.undefined}, ConfigError, "has a loss of nan"),
        (("qwen3-50k", digits, PROMPTS), {"loss": own_functions.per_token}, ConfigError, r"shape \(2, 4\)"),
        (("qwen3-50k", digits, PROMPTS), {"on_epoch_end": print}, ConfigError, "takes neither 'metrics'"),
        (("qwen3-50k", digits, PROMPTS), {"answer": ["1"]}, DatasetError, "'answer' has 1 values"),
        (("qwen3-50k", digits, PROMPTS), {"resume": True}, ConfigError, "output_dir"),
        (("qwen3-50k", digits, PROMPTS), {"overrides": {"finetuning.sed": 1}}, ConfigError, "mean 'seed'"),
        (("qwen3-50k", digits, PROMPTS), {"resume": True, "output_dir": "runs/x"}, RunDirectoryError, "runs/x"),
    ]:
        with pytest.raises(error, match=shown):
            jaxft.train(*arguments, **options)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


SCRIPT = """
import os, sys, jaxft
FOLDER, NUMBER = sys.argv[1], int(sys.argv[2])
calls = []
def digits(completion):
    calls.append(completion)
    if len(calls) == 2 * 32 + 7:  # in the third epoch
        os.kill(os.getpid(), NUMBER)
    return sum(character.isdigit() for character in completion) / 8
jaxft.train("qwen3-50k", digits, [f"number {i}?" for i in range(4)], num_epochs=6, max_completion_length=8,
            output_dir=FOLDER, resume="resume" in sys.argv)
"""


def run_script(folder, *arguments):
    command = [sys.executable, "-c", SCRIPT, str(folder), *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole_script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script") / "whole"
    assert run_script(folder, 0).returncode == 0  # signal 0 does nothing
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_stopped_or_killed_is_continued_bit_for_bit(whole_script, tmp_path, number):
    folder = tmp_path / "stopped"
    stopped = run_script(folder, int(number))
    assert stopped.returncode not in (0, None)
    if number == signal.SIGINT:
        assert "jaxft.errors.Stopped: saved as checkpoint" in stopped.stderr and "resume=True)" in stopped.stderr
    assert 2 <= len(metrics_of(folder).splitlines()) < 6
    assert run_script(folder, 0, "resume").returncode == 0
    assert metrics_of(folder) == metrics_of(whole_script)

"""Recipes of Tinker's cookbook, unmodified, to their ends, in a folder that has the names that they load."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from jaxft.serving.server import Server
from jaxft.tinker.app import make_app
from jaxft.tinker.service import Service

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not importlib.util.find_spec("tinker_cookbook"), reason="no tinker_cookbook"),
]
NAME = "Qwen/Qwen3-8B-Base"

SUMS = [(number, number % 7) for number in range(48)]
DATA = {
    "HuggingFaceH4/no_robots": [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in SUMS
    ],
    "openai/gsm8k": [{"question": f"{a}+{b}?", "answer": f"#### {a + b}"} for a, b in SUMS],
    "zwhe99/DeepMath-103K": [{"question": f"{a}+{b}?", "final_answer": str(a + b)} for a, b in SUMS],
    "Anthropic/hh-rlhf": [
        {"chosen": f"\n\nHuman: hi {a}\n\nAssistant: yes", "rejected": f"\n\nHuman: hi {a}\n\nAssistant: no"}
        for a, _ in SUMS
    ],
}
"""Local data sets, each under the name that a recipe loads it by."""

RECIPES = {
    "sl_loop": {"batch_size": 16, "lora_rank": 8, "max_steps": 3},
    "rl_loop": {
        **{"loss_fn": "importance_sampling", "batch_size": 8, "group_size": 4},
        **{"lora_rank": 8, "max_tokens": 16, "max_steps": 3},
    },
    "preference.dpo.train": {"dataset": "hhh", "renderer_name": "role_colon", "batch_size": 8, "max_steps": 3},
    "distillation.on_policy_distillation": {
        **{"teacher_model": NAME, "renderer_name": "role_colon", "groups_per_batch": 8, "group_size": 2},
        **{"lora_rank": 8, "max_tokens": 16, "max_steps": 3},
    },
}


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A working folder with a tokenizer and data sets, which win over the hub's of the same names."""
    folder = tmp_path_factory.mktemp("recipes")
    tokenizer.save_pretrained(folder / NAME)
    for name, rows in DATA.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(text, encoding="utf-8")
    config = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n"
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{config}---\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def url(make_policy, folder):
    policy = make_policy(slots=16, max_context_tokens=1024)
    server = Server(make_app(Service(policy, NAME, folder / "tinker")))
    yield server.url
    asyncio.run(server.close())


def run_recipe(name, folder, url, **fields):
    """The rows of metrics of a recipe that has run to its end."""
    log = folder / "logs" / name
    given = {"base_url": url, "model_name": NAME, "log_path": log, **fields}
    environment = {**os.environ, "TINKER_API_KEY": "tml-x", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={given[key]}" for key in given)]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_of_the_cookbook_run_to_their_ends(name, folder, url):
    rows = run_recipe(name, folder, url, **RECIPES[name])
    assert len(rows) >= 3
    if name == "sl_loop":
        losses = [row["train_mean_nll"] for row in rows]
        assert losses[-1] < losses[0]

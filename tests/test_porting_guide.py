"""jaxft's side of docs/from-nemo-agent-toolkit.md is true: the walk and every row run, shrunk, and the imports exist.

The toolkit's side is in tests/nat/test_guide.py.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import jaxft
from jaxft.cli import main

sys.path.insert(0, str(Path(__file__).parent / "data"))
from porting_guide import HERE, code, imports, in_a_factory, ported, snippets, walk

MOVE = "Move: `jaxft finetune`"
SMALL = [
    ("finetuning.num_epochs", "1"),
    ("llms.policy.slots", "16"),
]
"""Overrides of every row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the walk, with what the rows name: other data, another configuration, a model."""
    import jax

    folder = tmp_path_factory.mktemp("moved")
    for name, text in walk(MOVE)[0].items():
        (folder / name).write_text(text)
    rows = [{"id": n, "question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    (folder / "train.json").write_text(json.dumps(rows))
    (folder / "held_out.json").write_text(json.dumps(rows[:2]))
    (folder / "train.csv").write_text("number,question,sum\n1,1 + 1?,2\n2,2 + 2?,4\n")
    (folder / "judge.yml").write_text((folder / "run.yml").read_text())
    model, params = jaxft.init_model(jaxft.model_preset("qwen3-50k"), jax.random.key(0))
    jaxft.save_model(folder / "PATH_OR_HUB_ID", model, params, jaxft.load_tokenizer())
    return folder


@pytest.fixture
def train(folder, tmp_path, monkeypatch):
    """A function that trains with the run of the walk and the YAML of a row; returns the metrics of each job."""
    monkeypatch.chdir(folder)

    def run(text, *overrides):
        (folder / "row.yml").write_text(f"base: run.yml\n{text}")
        given = [*SMALL, ("finetuning.output_dir", str(tmp_path / "out")), *overrides]

        async def train():
            async with jaxft.open_session(jaxft.load_config(folder / "row.yml", given)) as session:
                return await session.train()

        statuses = asyncio.run(train())
        assert {status.status for status in statuses} == {jaxft.TrainingStatusEnum.COMPLETED}
        return [status.metadata["metrics"] for status in statuses]

    return run


def register(row, name):
    """Register the workflow of a row, and return the YAML that chooses it."""
    text = code(row, "python", HERE)
    module = in_a_factory(name, text) if text.startswith("llm = ") else text
    exec(compile(module, f"<{row}>", "exec"), {"jaxft": jaxft, "__name__": name})
    return f"workflow: {{_type: {name}, llm_name: policy}}\n"


@pytest.mark.docs
def test_the_walk_ends_with_a_trained_agent(tmp_path):
    files, commands = walk(MOVE)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "jaxft").write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m jaxft.cli "$@"\n')
    (tmp_path / "jaxft").chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = "\n".join(["set -e", *commands])
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=os.environ | paths, check=True, timeout=1200)
    rewards = [json.loads(row)["reward_mean"] for row in (tmp_path / "out/training_metrics.jsonl").open()]
    assert len(rewards) == 30 and rewards[0] < 0.1 and rewards[-1] > 0.95
    assert (tmp_path / "out/model/model.safetensors").is_file()


def test_every_row_has_a_test():
    rows = {each.row for each in snippets() if each.row and each.belongs_to(HERE)}
    tests = Path(__file__).read_text()
    assert len(rows) >= 9 and [row for row in rows if f'"{row}"' not in tests] == []


@pytest.mark.agents
def test_a_workflow_of_langchain(train):
    pytest.importorskip("langchain_openai")
    (metrics,) = train(register("A workflow", "assistant"))
    assert metrics["applied_updates"] == 1


@pytest.mark.slow
def test_a_workflow_with_tools(train):
    (metrics,) = train(register("Tools", "tools_of_the_guide"), ("llms.policy.max_context_tokens", "256"))
    assert metrics["applied_updates"] == 1


@pytest.mark.slow
def test_the_policy_is_a_folder_the_judge_a_server_and_a_function_is_trained(train, tmp_path):
    pytest.importorskip("openai")
    row = "Functions, and training aimed at them"
    chosen = register(row, "functions_of_the_guide") + code(row, "yaml", HERE)
    train(code("The language model", "yaml", HERE) + chosen)
    (metrics,) = map(json.loads, (tmp_path / "out/training_metrics.jsonl").open())
    assert metrics["calls"] == 64 and metrics["untargeted_calls"] == 32


@pytest.mark.slow
def test_the_three_parts_train_on_a_table_with_an_evaluator_of_the_toolkit_whose_imports_are_changed(train):
    exec(compile(ported(code("An evaluator", "python", HERE)), "<evaluator>", "exec"), {"__name__": "share"})
    parts = code("The dataset", "yaml", HERE) + code("Builder, adapter, trainer", "yaml", HERE)
    (metrics,) = train(parts, ("eval.evaluators.digits", "{_type: share}"))
    assert (metrics["groups"], metrics["kl"], metrics["applied_updates"]) == (2, 0, 1)


@pytest.mark.slow
def test_the_command_and_what_it_leaves(folder, tmp_path, monkeypatch):
    row = "The command, curriculum and validation"
    (folder / "with_curriculum.yml").write_text(f"base: run.yml\n{code(row, 'yaml', HERE)}")
    assert yaml.safe_load(code(row, "yaml", HERE)).keys() == {"finetuning", "eval"}
    command = code(row, "bash", HERE).replace("run.yml", "with_curriculum.yml").replace("\\\n", " ")
    small = " ".join(f"--set {path}={value}" for path, value in SMALL[1:])
    monkeypatch.chdir(folder)
    arguments = [each.strip("'") for each in f"{command} {small}".split()]
    assert arguments[0] == "jaxft" and main(arguments[1:]) == 0
    history = json.loads((folder / "out/validation_history.json").read_text())
    assert [row["epoch"] for row in history] == [0, 2]
    assert json.loads((folder / "out/curriculum_state.json").read_text())["current_percentile"] > 0.5
    found = {"json": json}
    exec(code("The results", "python", HERE), found)
    assert len(found["rewards"]) == 2


@pytest.mark.slow
def test_pairs_are_recorded_and_trained(train):
    (metrics,) = train(register("Preference pairs", "pairs_of_the_guide") + code("Preference pairs", "yaml", HERE))
    assert metrics["pairs_trained"] >= 4 and metrics["applied_updates"] == 1


def test_a_configuration_is_built_without_yaml(folder):
    found = {"jaxft": jaxft, "__name__": "built"}
    exec(walk(MOVE)[0]["my_agent.py"].replace('name="', 'name="built_'), found)
    text = textwrap.indent(code("Without YAML", "python", HERE), "    ")
    exec(f"async def build():\n{text}    return builder.config\n", found)
    config = asyncio.run(found["build"]())
    assert config.trajectory_builders["rollouts"].num_generations == 8 and config.llms["policy"].slots == 64


def test_jaxft_has_all_names_of_the_table_of_imports():
    names = {name for names in imports().values() for name in names} - {"EvaluatorBaseConfig"}
    assert len(names) == 41 and names <= set(jaxft.__all__)


@pytest.mark.slow
def test_parts_of_a_user_of_the_toolkit_need_other_imports_only(train, tmp_path):
    """tests/nat/others.py has a builder and a trainer of the toolkit's kind."""
    text = (Path(__file__).parent / "nat" / "others.py").read_text()
    head, body = text.split("class DigitsConfig")[0], text[text.index("class UserBuilderConfig") :]
    for line in ("function_info import", "component_ref import", "function import", "    register_function"):
        head = re.sub(rf"^.*{line}.*\n", "", head, flags=re.MULTILINE)
    exec(compile(ported(head + body), "<others>", "exec"), {"__name__": "others"})
    parts = f"""
trajectory_builders: {{rollouts: {{_type: user_traj_builder, num_generations: 4}}}}
trainers: {{loop: {{_type: user_trainer, file: {tmp_path / "statuses.json"}}}}}
"""
    metrics = train(parts, ("finetuning.num_epochs", "2"))
    assert [each["applied_updates"] for each in metrics] == [1, 1]

"""The toolkit's side of docs/from-nemo-agent-toolkit.md is true: the walk runs, and its snippets load and run."""

import asyncio
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import jaxft

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from porting_guide import PAGE, TOOLKIT, code, imports, snippets, walk

pytestmark = pytest.mark.nat

STAY, MOVE = "Stay: `nat finetune`", "Move: `jaxft finetune`"


@pytest.fixture
def walked(tmp_path, monkeypatch):
    """A function that does what a section has its reader do, in the working directory, with options added."""
    monkeypatch.chdir(tmp_path)
    for name, module in (("nat", "nat.cli.main"), ("jaxft", "jaxft.cli")):
        main = {"nat": "run_cli", "jaxft": "main"}[name]
        program = f"import sys; sys.path[:0] = {sys.path!r}; from {module} import {main}; sys.exit({main}())"
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -c {shlex.quote(program)} "$@"\n')
        (tmp_path / name).chmod(0o755)

    def run(section, options=""):
        files, commands = walk(section)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        *others, finetune = [command.split("    #")[0] for command in commands]
        script = "\n".join(["set -e", *others, f"{finetune} {options}"])
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=600)

    return run


def rows(file):
    return [json.loads(line) for line in Path(file).open()]


def test_both_walks_give_the_same_rewards_and_the_files_of_the_page(walked):
    stays = walked(STAY, "-o finetuning.num_epochs 2")
    assert stays.returncode == 0, stays.stderr
    tree = re.search(r"^```\nout/\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    listed = [line.split()[0] for line in tree.splitlines()]
    assert len(listed) == 4 and [name for name in listed if not Path("out", name).exists()] == []
    assert Path("out/jaxft/model/model.safetensors").is_file()
    found = {"json": json}
    exec(code("The results", "python", TOOLKIT), found)
    assert len(found["rewards"]) == 2

    moves = walked(MOVE, "-o finetuning.num_epochs 2 -o finetuning.output_dir moved")
    assert moves.returncode == 0, moves.stderr
    assert [row["reward_mean"] for row in rows("moved/training_metrics.jsonl")] == found["rewards"]


def merged(ours, other):
    """Return a configuration with the sections of a row; a component of another type replaces the old one."""
    for name, value in other.items():
        is_part = isinstance(value, dict) and isinstance(ours.get(name), dict) and "_type" not in value
        ours[name] = merged(ours[name], value) if is_part else value
    return ours


def loaded(row):
    """Return the toolkit's configuration of the walk with the sections of a row."""
    from nat.data_models.config import Config
    from nat.runtime.loader import PluginTypes, discover_and_register_plugins
    from nat.utils.data_models.schema_validator import validate_schema

    discover_and_register_plugins(PluginTypes.ALL)
    given = merged(yaml.safe_load(walk(STAY)[0]["config.yml"]), yaml.safe_load(code(row, "yaml", TOOLKIT)))
    return given, validate_schema(given, Config)


def test_every_row_has_a_test():
    named = {each.row for each in snippets() if each.row and each.belongs_to(TOOLKIT)}
    tests = Path(__file__).read_text()
    assert len(named) >= 9 and [row for row in named if f'"{row}"' not in tests] == []


NEEDS = {"Builder, adapter, trainer": "art", "Preference pairs": "nat.plugins.customizer"}
"""Packages of the toolkit that a row's components are in."""


@pytest.mark.parametrize(
    "row",
    [
        "The language model",
        "Tools",
        "Functions, and training aimed at them",
        "The dataset",
        "Builder, adapter, trainer",
        "The command, curriculum and validation",
        "Preference pairs",
    ],
)
def test_the_configuration_of_a_row_loads(row):
    if row in NEEDS:
        pytest.importorskip(NEEDS[row])
    given, config = loaded(row)
    assert config.model_dump(mode="json")["finetuning"]["trainer"] == given["finetuning"]["trainer"]


@pytest.mark.parametrize(("row", "max_tokens"), [("Tools", 300), ("Functions, and training aimed at them", 12)])
def test_the_workflow_of_a_row_trains_with_the_plugin(row, max_tokens, finetune, folder):
    given, _ = loaded(row)
    changes = {name: given[name] for name in ("functions", "workflow")}
    targets = given["finetuning"].get("target_functions", ["<workflow>"])
    finetune(
        **changes,
        llms__policy__max_context_tokens=512,
        llms__policy__max_tokens=max_tokens,
        trajectory_builders__own__failed_reward=0.0,  # an answer of random weights may be cut off
        trainers__own__max_failed_fraction=1.0,
        finetuning__target_functions=targets,
        finetuning__num_epochs=1,
    )
    (row,) = rows("out/training_metrics.jsonl")
    assert row["applied_updates"] == 1 and (row.get("untargeted_calls", 0) > 0) == (targets == ["planner"])


def test_the_workflow_and_the_evaluator_train_with_the_plugin(folder):
    text = "\n".join(code(row, "python", TOOLKIT) for row in ("A workflow", "An evaluator"))
    (folder / "parts_of_the_guide.py").write_text(text)
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["workflow"] = {"_type": "assistant", "llm_name": "policy"}
    config["eval"]["evaluators"] = {"reward": {"_type": "share"}}
    config["finetuning"]["num_epochs"] = 1
    for part in ("trajectory_builders", "trainer_adapters", "trainers"):
        del config[part]["user"]
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    program = (
        f"import sys; sys.path[:0] = {['', *sys.path]!r}; import parts_of_the_guide; "
        "from nat.cli.main import run_cli; sys.exit(run_cli())"
    )
    command = [sys.executable, "-c", program, "finetune", "--config_file", "config.yml"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert rows("out/training_metrics.jsonl")[0]["applied_updates"] == 1


def test_candidates_are_steps():
    from nat.builder.context import Context

    steps, found = [], {"__name__": "guide"}
    exec(next(each.text for each in snippets() if each.row == "Preference pairs" and each.side == TOOLKIT), found)
    Context.get().intermediate_step_manager.subscribe(on_next=steps.append)
    found["record"]("turn", "prompt", ["a", "b"], [1.0, 0.0])
    ends = [step.payload for step in steps if step.payload.event_type == "TTC_END"]
    assert [(end.name, end.data.turn_id, end.data.score) for end in ends] == [
        ("dpo_candidate_move", "turn", 1.0),
        ("dpo_candidate_move", "turn", 0.0),
    ]


def test_a_workflow_is_built_without_yaml():
    _, config = loaded("Tools")
    workflow = {"_type": "chat_completion", "llm_name": "policy"}
    given = {"llm": config.llms["policy"], "trajectory_builder": config.trajectory_builders["rollouts"]}
    given["workflow"] = type(loaded("The dataset")[1].workflow).model_validate(workflow)
    text = textwrap.indent(code("Without YAML", "python", TOOLKIT), "    ")
    exec(
        f"async def build(llm, workflow, trajectory_builder):\n{text}        return builder.get_workflow_config()",
        given,
    )
    build = given.pop("build")
    built = asyncio.run(build(given["llm"], given["workflow"], given["trajectory_builder"]))
    assert built.llm_name == "policy"


def test_the_command_has_the_options_of_the_page():
    from nat.cli.commands.finetune import finetune_command

    known = {option for parameter in finetune_command.params for option in parameter.opts}
    command = code("The command, curriculum and validation", "bash", TOOLKIT)
    used = {word for word in shlex.split(command.replace("\\\n", " ")) if word.startswith("-")}
    assert used <= known and known - used == {"--override", "--endpoint", "--endpoint_timeout"}


def test_the_toolkit_has_all_names_of_the_table_of_imports():
    for module, names in imports().items():
        assert [name for name in names if name not in vars(importlib.import_module(module))] == [], module


def test_the_components_have_the_fields_of_the_page():
    from jaxft.nat.configs import AdapterConfig, BuilderConfig, DPOConfig, GRPOConfig, PolicyConfig

    configs = {"policy": PolicyConfig, "trajectory_builder": BuilderConfig, "trainer_adapter": AdapterConfig}
    configs |= {"trainer": GRPOConfig, "dpo_trainer": DPOConfig}
    listed = re.findall(r"^\| `jaxft_(\w+)`[^|]*\|[^|]*\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in listed] == list(configs)
    kinds = jaxft.LocalPolicyConfig, jaxft.GRPOTrajectoryBuilderConfig, jaxft.LocalTrainerAdapterConfig
    for (name, cell), kind in zip(listed, (*kinds, jaxft.GRPOTrainerConfig, jaxft.DPOTrainerConfig), strict=True):
        others, *own = re.findall(r"`(\w+)`", cell)
        assert others == kind.type_name and {*own, *kind.model_fields} - {"reward"} <= {*configs[name].model_fields}


def test_a_failed_job_under_a_trainer_of_others_ends_with_exit_code_0(nat, folder, monkeypatch):
    monkeypatch.setenv("MAX_LOGPROB_DIFF", "1e-12")
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["finetuning"] |= {"trainer": "user", "num_epochs": 1}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    assert nat("finetune", "--config_file", "config.yml").returncode == 0
    assert [status["status"] for status in json.loads((folder / "statuses.json").read_text())] == ["failed"]

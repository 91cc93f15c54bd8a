import re
import sys
from pathlib import Path

import pytest

from jaxft.components.train import TrainResult
from jaxft.errors import ConfigError
from jaxft.harness.config import config_from_mapping, load_config, resolved_yaml
from jaxft.harness.config_help import differences_to_defaults, help_text
from jaxft.harness.data_models import FinetuneConfig
from jaxft.harness.datasets import load_jsonl
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.harness.verbs import run_arguments
from jaxft.report.compared_runs import LeftOut, find_runs

SENTINEL = "sk-TEST-SENTINEL"


def faults_of(mapping, base_dir, overrides=()):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping, base_dir=base_dir, overrides=overrides)
    return caught.value.faults


def test_differences_to_the_defaults_are_listed_with_both_values(toy_run, tmp_path):
    changes = [("finetuning.seed", "3"), ("eval.general.worker_memory_mb", "64"), ("finetuning.checkpoints.every", "1")]
    differences = differences_to_defaults(config_from_mapping(toy_run, base_dir=tmp_path, overrides=changes))
    assert differences["finetuning.seed"] == {"value": 3, "default": 0}
    assert differences["eval.general.worker_memory_mb"] == {"value": 64, "default": 4096}
    assert differences["finetuning.reward_function.name"] == {"value": "match"}
    assert "finetuning.checkpoints.every" not in differences and "finetuning.grace_seconds" not in differences


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(toy_run, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    toy_run["finetuning"]["output_dir"] = "~/runs/{finetuning.seed}"
    toy_run["eval"]["general"]["output_dir"] = "~no-such-user/runs"  # a name like others
    (home / "run.yml").write_text(dump_yaml(toy_run))
    (tmp_path / "child.yml").write_text("base: ~/run.yml\n")
    (home / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    for file in ("~/run.yml", tmp_path / "child.yml"):
        config = load_config(file)
        assert str(config.finetuning.output_dir) == f"{home}/runs/0"
        assert str(config.eval.general.output_dir) == "~no-such-user/runs"
    assert FinetuneConfig(output_dir=Path("~/a")).output_dir == home / "a" == TrainResult("~/a").output_dir
    assert load_jsonl(Path("~/rows.jsonl"))[0].input_obj == "1+1"
    assert run_arguments("").parse_args(["--config_file=~/run.yml"]).config_file == home / "run.yml"
    assert find_runs(["~/r*/"])[1] == [LeftOut(f"{home}/r*/", "matches nothing")]


def test_all_faults_are_reported_at_once(toy_run, tmp_path):
    toy_run["finetuning"] |= {"num_epoch": 3, "num_epochs": 0, "seed": -1, "trainer": "lop"}
    toy_run["workflow"] = {"_type": "toy_agnet"}
    toy_run["trainers"]["loop"]["speed"] = 2
    toy_run["eval"]["general"]["max_concurrency"] = "many"
    toy_run["eval"]["evaluators"]["other"] = {}
    toy_run["extra"] = {}
    faults = faults_of(toy_run, tmp_path)
    assert set(faults) >= {
        "finetuning.num_epoch: no such field; did you mean 'num_epochs'?",
        "finetuning.num_epochs: must be greater than or equal to 1",
        "finetuning.seed: must be greater than or equal to 0",
        "finetuning.trainer: 'lop' is not in 'trainers'; did you mean 'loop'?",
        "trainers.loop.speed: no such field; fields here: reward",
    }
    text = "\n".join(faults)
    assert re.search(
        r"workflow: no workflow is named 'toy_agnet'; did you mean 'toy_agent'\?; registered: .*toy_agent", text
    )
    assert re.search(
        r"eval.evaluators.other: needs '_type', which chooses the evaluator; registered: .*toy_match", text
    )
    assert "eval.general.max_concurrency: must be a valid integer" in text and "many" not in text
    assert re.search(r"^extra: no such field; fields here: .*finetuning", text, re.MULTILINE)
    assert len(faults) == 9


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workflow.llm", "nobody", "workflow.llm: 'nobody' is not in 'llms'; there: policy"),
        ("finetuning.reward_function.name", "matsch", "finetuning.reward_function.name: 'matsch' is not in 'eval.eval"),
        ("finetuning.trajectory_builder", "null", "finetuning: enabled, but without trajectory_builder"),
        ("finetuning.seed", "4294967296", "finetuning.seed: must be less than 4294967296"),
        ("finetuning.num_epochs", "true", "finetuning.num_epochs: must be a number (holds a bool)"),
        ("finetuning.curriculum_learning.random_subsample", "0", "finetuning.curriculum_learning.random_subsample: "),
        ("finetuning.target_functions", "[]", "finetuning.target_functions: must name at least one function"),
        ("finetuning.target_model", "m", "finetuning.target_model: 'm' is not in 'llms'; there: policy"),
        ("eval.general.dataset", "3", "eval.general.dataset: must be a mapping with '_type' (holds a number)"),
        ("trainers.loop._type", "toy_adapter", "trainers.loop: no trainer is named 'toy_adapter'"),
        ("eval.general", "null", "eval.general: must be a mapping (holds nothing)"),
        ("finetuning.num_epochs", "${NOPE_NOPE}", "finetuning.num_epochs: the environment variable 'NOPE_NOPE' is not"),
        ("finetuning.sead", "1", "finetuning.sead: no such field; did you mean 'seed'?"),
        ("finetuning.seed.x", "1", "finetuning.seed.x: cannot be set: 'finetuning.seed' holds a number"),
        ("finetuning.nothing.at.all", "1", "finetuning.nothing: no such field"),
        (
            "eval.general.dataset.questions.2",
            "q",
            "eval.general.dataset.questions.2: cannot be set: 'eval.general.datas",
        ),
        ("eval.general.dataset.questions.x", "q", "eval.general.dataset.questions.x: cannot be set"),
        ("finetuning.seed", "[1", "finetuning.seed: the value given on the command line is not YAML: quote it"),
        ("imports", "[3]", "imports.0: "),
    ],
)
def test_single_faults(toy_run, tmp_path, path, value, message):
    toy_run["finetuning"]["seed"] = 0
    toy_run["eval"]["general"]["dataset"]["questions"] = ["a", "b"]
    (config_error,) = faults_of(toy_run, tmp_path, [(path, value)])
    assert config_error.startswith(message)


def test_a_missing_section_is_named(toy_run, tmp_path):
    del toy_run["workflow"], toy_run["eval"]["general"]["dataset"]
    assert faults_of(toy_run, tmp_path) == (
        "workflow: is required, but not there",
        "eval.general.dataset: is required, but not there",
    )


def test_overrides(toy_run, tmp_path):
    overrides = [
        ("finetuning.num_epochs", "7"),
        ("eval.general.dataset.questions", "[x, y]"),
        ("eval.general.dataset.questions.1", "z"),
        ("finetuning.curriculum_learning.min_reward_diff", "1e-3"),
        ("trainers.other", "{_type: toy_trainer}"),
    ]
    config = config_from_mapping(toy_run, base_dir=tmp_path, overrides=overrides)
    assert config.finetuning.num_epochs == 7
    assert config.eval.general.dataset.questions == ("x", "z")
    assert config.finetuning.curriculum_learning.min_reward_diff == 1e-3
    assert set(config.trainers) == {"loop", "other"}


def test_variables(toy_run, tmp_path, monkeypatch):
    monkeypatch.setenv("QUESTION", "a: [b]")
    monkeypatch.delenv("NOPE", raising=False)
    toy_run["eval"]["general"]["dataset"]["questions"] = ["${QUESTION}", "x${NOPE:-y}", "${NOPE:-}", "$${QUESTION}"]
    toy_run["finetuning"]["num_epochs"] = "${NOPE:-3}"
    config = config_from_mapping(toy_run, base_dir=tmp_path)
    assert config.eval.general.dataset.questions == ("a: [b]", "xy", "", "${QUESTION}")
    assert config.finetuning.num_epochs == 3


def test_files_inherit(toy_run, tmp_path):
    (tmp_path / "deep").mkdir()
    data = tmp_path / "deep" / "rows.jsonl"
    toy_run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "rows.jsonl"}
    (tmp_path / "deep" / "base.yml").write_text(dump_yaml(toy_run))
    (tmp_path / "run.yml").write_text("base: deep/base.yml\nfinetuning: {num_epochs: 9}\n")
    config = load_config(tmp_path / "run.yml", [("finetuning.seed", "5")])
    assert (config.finetuning.num_epochs, config.finetuning.seed, config.finetuning.trainer) == (9, 5, "loop")
    assert config.eval.general.dataset.file_path == data


def test_an_inherited_component_is_replaced_by_one_of_another_type_and_taken_away_by_null(toy_run, tmp_path):
    dataset = {"_type": "csv", "file_path": "rows.csv", "id_key": "name"}
    toy_run["eval"] |= {"general": {"dataset": dataset}, "validation": {"dataset": dataset, "interval": 2}}
    toy_run["eval"]["evaluators"]["other"] = {"_type": "toy_match"}
    (tmp_path / "base.yml").write_text(dump_yaml(toy_run))
    changes = {
        "base": "base.yml",
        "eval": {
            "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
            "validation": {"dataset": {"file_path": "held_out.csv"}},
            "evaluators": {"other": None},
        },
    }
    (tmp_path / "run.yml").write_text(dump_yaml(changes))
    config = load_config(tmp_path / "run.yml")
    kept, held_out = config.eval.general.dataset, config.eval.validation.dataset
    assert (kept.type_name, kept.file_path, kept.id_key) == ("jsonl", tmp_path / "rows.jsonl", "id")
    assert (held_out.type_name, held_out.id_key, held_out.file_path.name) == ("csv", "name", "held_out.csv")
    assert list(config.eval.evaluators) == ["match"]
    config = load_config(tmp_path / "base.yml", [("eval.evaluators.other", "null"), ("eval.validation", "null")])
    assert list(config.eval.evaluators) == ["match"] and config.eval.validation is None
    with pytest.raises(ConfigError, match=r"finetuning\.reward_function\.name: 'match' is not in 'eval.evaluators'"):
        load_config(tmp_path / "run.yml", [("eval.evaluators.match", "null")])
    with pytest.raises(ConfigError, match=r"evaluators\.new: must be a mapping with '_type'"):  # nothing to take away
        load_config(tmp_path / "run.yml", [("eval.evaluators.new", "null")])


def test_a_path_on_the_command_line_is_relative_to_the_working_directory(toy_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = "{_type: jsonl, file_path: rows.jsonl}"
    config = config_from_mapping(toy_run, base_dir=tmp_path / "x", overrides=[("eval.general.dataset", dataset)])
    assert config.eval.general.dataset.file_path == tmp_path / "rows.jsonl"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"run\.yml: cannot be read: No such file"),
        ({"run.yml": b"base: loop.yml"}, r"loop\.yml: cannot be read"),
        ({"run.yml": b"base: other.yml"}, r"other\.yml: cannot be read: .* \(base of .*run\.yml\)"),
        ({"run.yml": b"base: other.yml", "other.yml": b"base: run.yml"}, r"inherits itself: .*run.yml -> .*other.yml"),
        ({"run.yml": b"base: [x]"}, r"base: wants the path of a YAML file, holds a list"),
        ({"run.yml": b"base: ${NOPE_NOPE}"}, r"base: the environment variable 'NOPE_NOPE' is not set"),
        ({"run.yml": b"- a"}, r"run\.yml:1: wants a mapping of sections, holds a list"),
        ({"run.yml": b""}, r"run\.yml:1: wants a mapping of sections, holds nothing"),
        ({"run.yml": b"a: 1\nb: \xff"}, r"run\.yml:2: not UTF-8"),
        ({"run.yml": b"a: 1\na: 2"}, r"run\.yml:2: the key 'a' is there twice"),
    ],
)
def test_files_that_cannot_be(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "loop.yml").symlink_to(tmp_path / "loop.yml")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "run.yml")


def test_secrets_are_nowhere(toy_run, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", SENTINEL)
    toy_run["llms"]["policy"]["api_key"] = "${KEY}"
    config = config_from_mapping(toy_run, base_dir=tmp_path)
    assert config.llms["policy"].api_key.get_secret_value() == SENTINEL
    assert SENTINEL not in resolved_yaml(config) + repr(config)
    for path, value in [
        ("llms.policy.api_kee", SENTINEL),
        ("finetuning.seed", SENTINEL),
        ("llms.policy.api_key", "[s"),
    ]:
        with pytest.raises(ConfigError) as caught:
            config_from_mapping(toy_run, base_dir=tmp_path, overrides=[(path, value)])
        assert SENTINEL not in str(caught.value)


def test_the_resolved_tree_loads_again_from_any_folder(toy_run, tmp_path):
    module = tmp_path / "my_reloaded_parts.py"
    module.write_text("")
    toy_run["imports"] = ["my_reloaded_parts"]
    toy_run["eval"]["general"]["dataset"] = {"_type": "jsonl", "file_path": "../data/rows.jsonl"}
    toy_run["workflow"]["fail_on"] = ["1e-5", "$${X}", "no", "é"]
    config = config_from_mapping(toy_run, base_dir=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.yml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "elsewhere" / "config.yml") == config
    assert config.imports == (str(module),)


MODULE = """
from jaxft.harness.registry import EvaluatorConfig, register_evaluator
class ImportedConfig(EvaluatorConfig, name="{name}"):
    limit: int = 1
@register_evaluator(config_type=ImportedConfig)
async def imported(config, builder):
    yield lambda item: 1.0
"""


def test_modules_are_found_next_to_the_file(toy_run, tmp_path):
    (tmp_path / "my_parts_a.py").write_text(MODULE.format(name="imported_a"))
    toy_run["imports"] = ["my_parts_a"]
    toy_run["eval"]["evaluators"]["new"] = {"_type": "imported_a", "limit": 2}
    assert config_from_mapping(toy_run, base_dir=tmp_path).eval.evaluators["new"].limit == 2


def test_a_module_that_fails_is_one_fault_with_its_traceback(toy_run, tmp_path):
    (tmp_path / "my_parts_b.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    toy_run["imports"] = ["my_parts_b", "my_parts_nowhere"]
    toy_run["eval"]["evaluators"]["new"] = {"_type": "imported_b"}
    toy_run["finetuning"]["seed"] = -1
    broken, missing, seed = faults_of(toy_run, tmp_path)
    assert broken.startswith("imports.0: the module 'my_parts_b' cannot be imported:\n")
    assert "line 2, in f" in broken and broken.endswith("ZeroDivisionError: division by zero")
    assert missing.startswith("imports.1: the module 'my_parts_nowhere' cannot be imported")
    assert seed.startswith("finetuning.seed: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import json\ndef f(:\n", "cannot be imported: {file}:2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ],
)
def test_a_module_that_is_no_python_or_exits_is_one_fault(toy_run, tmp_path, content, reason):
    file = tmp_path / f"my_parts_{len(content)}.py"
    file.write_text(content)
    (config_error,) = faults_of(toy_run | {"imports": [file.stem]}, tmp_path)
    assert config_error.startswith(f"imports.0: the module '{file.stem}'") and config_error.endswith(
        reason.format(file=file)
    )


def test_two_modules_of_one_name_are_told_apart(toy_run, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_parts_c.py").write_text(MODULE.format(name=f"imported_{folder}"))
    toy_run["imports"] = ["my_parts_c"]
    config_from_mapping(toy_run, base_dir=tmp_path / "one")
    (config_error,) = faults_of(toy_run, tmp_path / "two")
    assert re.fullmatch(
        r"imports\.0: the module 'my_parts_c' is .*one.*, not .*two.*: rename one of them", config_error
    )
    sys.modules.pop("my_parts_c")


def test_every_field_of_finetuning_is_described_and_listed():
    text = help_text()
    for name, field in FinetuneConfig.model_fields.items():
        assert field.description, name
        assert (f"finetuning.{name}" in text) == (not field.exclude)  # excluded: set by the run
    assert "eval.general.dataset  _type: jsonl" in text
    assert 'structure.question_key (str or null, default "question")' in text

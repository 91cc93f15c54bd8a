import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import ConfigError
from jaxft.files import safe_name
from jaxft.harness.commands import finetune
from jaxft.harness.config import config_from_mapping, load_config, resolved_yaml
from jaxft.harness.config_merge import ConfigErrors, expanded, literal
from jaxft.harness.config_types import ConfigText
from jaxft.harness.runtime import run_script
from jaxft.harness.strict_yaml import dump_yaml, parse_yaml
from jaxft.harness.verbs import run_arguments

SENTINEL = "sk-TEST-SENTINEL"


def faults_of(mapping, base_dir, overrides=()):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping, base_dir=base_dir, overrides=overrides)
    return caught.value.faults


def texts(toy_run, tmp_path, *values):
    """What a field of texts holds after loading."""
    toy_run["workflow"]["fail_on"] = list(values)
    return config_from_mapping(toy_run, base_dir=tmp_path).workflow.fail_on


def test_a_text_that_names_a_file_is_a_text(toy_run, tmp_path):
    with pytest.warns(FutureWarning, match=r"workflow\.fail_on\.0: 'file://' reads no file"):
        assert texts(toy_run, tmp_path, "file://prompt.txt") == ("file://prompt.txt",)


def test_a_base_is_a_path_and_no_text(tmp_path):
    (tmp_path / "run.yml").write_text("base: file://other.yml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "run.yml")


@given(st.lists(st.sampled_from(["$", "{", "}", "$${", ":-", "f"])).map("".join))
def test_a_literal_means_itself(text):
    faults = ConfigErrors()
    assert expanded(ConfigText(literal(text), Path("/nowhere")), "a", faults) == text
    assert not faults


def output_dir(toy_run, tmp_path, text, overrides=()):
    toy_run["finetuning"]["output_dir"] = text
    return str(config_from_mapping(toy_run, base_dir=tmp_path, overrides=overrides).finetuning.output_dir)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("runs/{seed}", "runs/7"),
        ("runs/{finetuning.seed}", "runs/7"),
        ("runs/{trainer}-{num_epochs}", "runs/loop-2"),
        ("{workflow._type}", "toy_agent"),
        ("{trainer_adapters.local.status}", "completed"),
        ("{eval.general.output_dir}", "null"),
        ("{finetuning.strict_compile}", "false"),
        ("{target_functions.0}", safe_name("<workflow>")),
        ("runs/{{seed}}", "runs/{seed}"),
        ("{{{seed}}}", "{7}"),
        ("$${{x}}", "${x}"),
    ],
)
def test_fields_are_expanded_after_overrides(toy_run, tmp_path, text, path):
    found = output_dir(toy_run, tmp_path, text, [("finetuning.seed", "7")])
    assert found == path


def test_a_value_never_leads_to_another_folder(toy_run, tmp_path):
    toy_run["llms"]["../../etc"] = {"_type": "toy_llm"}
    toy_run["workflow"]["llm"] = "../../etc"
    found = output_dir(toy_run, tmp_path, "runs/{workflow.llm}")
    folder, name = found.split("/")
    assert folder == "runs" and name.startswith("_.._etc-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{sed}", "'{sed}' is no field; did you mean 'seed'?"),
        ("{trainer_adapters.local.statu}", "did you mean 'trainer_adapters.local.status'?"),
        ("{}", "'{}' is no field"),
        ("{seed:03d}", "'{seed:03d}' is no field"),
        ("a{seed", "holds a '{' alone"),
        ("a}", "holds a '}' alone"),
        ("{output_dir}", "the directory itself"),
        ("{finetuning}", "is a mapping"),
        ("{target_functions}", "is a list"),
        ("{llms.policy.api_key}", "is a secret"),
        ("{finetuning.run_configuration}", "is no field"),
    ],
)
def test_what_is_no_field_is_one_fault(toy_run, tmp_path, text, message):
    toy_run["llms"]["policy"]["api_key"] = "sk-123456"
    with pytest.raises(ConfigError) as caught:
        output_dir(toy_run, tmp_path, text)
    (fault,) = caught.value.faults
    assert fault.startswith("finetuning.output_dir: ") and message in fault and "sk-123456" not in fault


def test_the_recorded_configuration_has_the_expanded_path(toy_run, tmp_path):
    toy_run["finetuning"]["output_dir"] = "runs/{{x}}/{seed}"
    config = config_from_mapping(toy_run, base_dir=tmp_path)
    text = resolved_yaml(config)
    assert parse_yaml(text, "")["finetuning"]["output_dir"] == "runs/{{x}}/0"
    (tmp_path / "again.yml").write_text(text)
    assert load_config(tmp_path / "again.yml").finetuning.output_dir == config.finetuning.output_dir


def test_a_run_is_made_in_its_own_directory(toy_run, tmp_path):
    toy_run["finetuning"]["output_dir"] = f"{tmp_path}/runs/{{seed}}"
    (tmp_path / "run.yml").write_text(dump_yaml(toy_run))
    parser = run_arguments("A script.", tmp_path / "run.yml")
    assert run_script(finetune, parser, ["--set", "finetuning.seed=5"]) == 0
    run = tmp_path / "runs" / "5"
    assert json.loads((run / "environment.json").read_text())["resume_command"] == f"jaxft resume {run}"
    assert load_config(run / "config.yml").finetuning.output_dir == run


def test_the_output_directory_of_a_validation_configuration_is_not_looked_at(toy_run, tmp_path):
    other = json.loads(json.dumps(toy_run))
    other["finetuning"]["output_dir"] = "{nothing}"
    (tmp_path / "other.yml").write_text(dump_yaml(other))
    toy_run["eval"]["validation"] = {"config_file": "other.yml"}
    assert output_dir(toy_run, tmp_path, "a/{seed}") == "a/0"

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.errors import ConfigError
from jaxft.harness.config import config_from_mapping, load_config, resolved_yaml
from jaxft.harness.config_merge import ConfigErrors, expanded, literal
from jaxft.harness.config_types import ConfigText
from jaxft.harness.strict_yaml import dump_yaml

SENTINEL = "sk-TEST-SENTINEL"


def faults_of(mapping, base_dir, overrides=()):
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping, base_dir=base_dir, overrides=overrides)
    return caught.value.faults


def texts(toy_run, tmp_path, *values, overrides=()):
    """What a field of texts holds after loading."""
    toy_run["workflow"]["fail_on"] = list(values)
    return config_from_mapping(toy_run, base_dir=tmp_path, overrides=overrides).workflow.fail_on


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [b]\n- ${HOME} $${X} # c\n", "a: [b]\n- ${HOME} $${X} # c"),
        (b"\xef\xbb\xbfone\r\ntwo\r\n", "one\r\ntwo"),
        (b"one\n\n", "one\n"),
        (b"one \r", "one \r"),
        (b"\n", ""),
        (b"", ""),
        (b"file://prompt.txt", "file://prompt.txt"),
        (b"$file://prompt.txt", "$file://prompt.txt"),
        ("é\u2028\ufeff\t\x07".encode(), "é\u2028\ufeff\t\x07"),
    ],
)
def test_the_text_of_a_file_is_taken_as_it_stands_and_survives_the_resolved_tree(toy_run, tmp_path, content, text):
    (tmp_path / "prompt.txt").write_bytes(content)
    toy_run["workflow"]["fail_on"] = ["file://prompt.txt"]
    config = config_from_mapping(toy_run, base_dir=tmp_path)
    assert config.workflow.fail_on == (text,)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.yml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "elsewhere" / "config.yml") == config


def test_files_are_relative_to_the_file_that_names_them(toy_run, tmp_path, monkeypatch):
    for folder in ("base", "run", "work"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p.txt").write_text(folder)
    toy_run["workflow"]["fail_on"] = ["file://p.txt", f"file://{tmp_path}/run/p.txt"]
    toy_run["llms"]["policy"]["api_key"] = "file://p.txt"
    (tmp_path / "base" / "base.yml").write_text(dump_yaml(toy_run))
    (tmp_path / "run" / "run.yml").write_text("base: ../base/base.yml\nllms: {policy: {api_key: 'file://p.txt'}}")
    monkeypatch.chdir(tmp_path / "work")
    config = load_config(tmp_path / "run" / "run.yml")
    assert config.workflow.fail_on == ("base", "run")
    assert config.llms["policy"].api_key.get_secret_value() == "run"
    overridden = load_config(tmp_path / "run" / "run.yml", [("workflow.fail_on", "[file://p.txt]")])
    assert overridden.workflow.fail_on == ("work",)


def test_variables_are_expanded_before_the_file_is_read(toy_run, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("${NAME}\n")
    monkeypatch.setenv("NAME", "p")
    monkeypatch.setenv("HOME", str(tmp_path))
    values = ["file://${NAME}.txt", "${NOPE:-file://p.txt}", "file://~/p.txt", "see file://p.txt"]
    assert texts(toy_run, tmp_path, *values) == (*["${NAME}"] * 3, "see file://p.txt")


def test_an_escaped_file_is_a_text(toy_run, tmp_path):
    assert texts(toy_run, tmp_path, "$file://x", "$$file://x", "$$${file://x") == (
        "file://x",
        "$file://x",
        "$${file://x",
    )


def test_a_number_may_stand_in_a_file(toy_run, tmp_path):
    (tmp_path / "n").write_text("7\n")
    toy_run["finetuning"]["num_epochs"] = "file://n"
    assert config_from_mapping(toy_run, base_dir=tmp_path).finetuning.num_epochs == 7


def test_files_that_cannot_be_read_are_faults_with_all_the_others(toy_run, tmp_path, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    (tmp_path / "latin").write_bytes(SENTINEL.encode() + b"\xff")
    (tmp_path / "wide").write_bytes(SENTINEL.encode("utf-16-le"))
    toy_run["workflow"]["fail_on"] = [
        "file://gone",
        "file://latin",
        "file://wide",
        "file://",
        "file://${NOPE}",
        "file://a\0b",
    ]
    toy_run["finetuning"]["seed"] = -1
    faults = faults_of(toy_run, tmp_path, [("finetuning.num_epochs", "file://gone")])
    at = "workflow.fail_on"
    assert faults == (
        f"{at}.0: {tmp_path}/gone: cannot be read: No such file or directory",
        f"{at}.1: {tmp_path}/latin: not UTF-8: convert the file",
        f"{at}.2: {tmp_path}/wide: cannot be read: holds zero bytes, as UTF-16 does: convert the file to UTF-8",
        f"{at}.3: {tmp_path}: cannot be read: Is a directory",
        f"{at}.4: the environment variable 'NOPE' is not set: set it, or write ${{NOPE:-default}}",
        f"{at}.5: {tmp_path}/a\0b: cannot be read: embedded null byte",
        f"finetuning.num_epochs: {Path.cwd()}/gone: cannot be read: No such file or directory",
        "finetuning.seed: must be greater than or equal to 0",
    )


@pytest.mark.parametrize(
    "path",
    ["workflow.llm", "workflow._type", "finetuning.reward_function.name", "finetuning.seed", "imports.0", "llms"],
)
def test_no_fault_shows_what_a_file_holds(toy_run, tmp_path, path):
    (tmp_path / "key.txt").write_text(f"{SENTINEL}\n")
    toy_run["imports"] = [""]
    faults = faults_of(toy_run, tmp_path, [(path, f"file://{tmp_path}/key.txt")])
    assert SENTINEL not in "\n".join(faults)


def test_a_base_is_a_path_and_no_text(tmp_path):
    (tmp_path / "run.yml").write_text("base: file://other.yml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "run.yml")


@given(st.lists(st.sampled_from(["$", "{", "}", "$${", ":-", "f", "file://"])).map("".join))
def test_a_literal_means_itself(text):
    faults = ConfigErrors()
    assert expanded(ConfigText(literal(text), Path("/nowhere")), "a", faults) == text
    assert not faults

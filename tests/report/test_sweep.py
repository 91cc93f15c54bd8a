"""The grid of runs that the options of a sweep make, their names, and what is refused."""

import argparse

import pytest

from jaxft.errors import ConfigError
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.report.sweep import make_grid, parse_seeds, read_list, split_alternatives, yaml_text

LOSS, RATE = "trainer_adapters.local.loss.name", "trainer_adapters.local.optimizer.learning_rate"


def names(settings=(), entries=(), seeds=(), first_seed=0):
    return [run.name for run in make_grid(settings, entries, seeds, first_seed)[1]]


@pytest.mark.parametrize(
    ("text", "alternatives"),
    [
        ("a", ["a"]),
        ("", [""]),
        ("a,b , c", ["a", "b", "c"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{name: grpo, beta: 0},{name: dapo}", ["{name: grpo, beta: 0}", "{name: dapo}"]),
        ("'a,b','it''s'", ["'a,b'", "'it''s'"]),
        (r'"a\",b",c', [r'"a\",b"', "c"]),
        ('[",]"],x', ['[",]"]', "x"]),
        ("don't,won't", ["don't", "won't"]),
        ("${A:-x,y}/1,b", ["${A:-x,y}/1", "b"]),
    ],
)
def test_commas_outside_of_quotes_and_brackets_separate(text, alternatives):
    assert split_alternatives(text) == alternatives


def test_a_grid_has_every_combination_and_seeds_change_fastest():
    assert names([(LOSS, "grpo,dapo"), ("finetuning.num_epochs", "5")], seeds=(2,)) == [
        "loss.name=grpo,seed=0",
        "loss.name=grpo,seed=1",
        "loss.name=dapo,seed=0",
        "loss.name=dapo,seed=1",
    ]


def test_a_single_value_is_shared_and_a_number_of_seeds_begins_at_the_configured_one():
    shared, runs = make_grid([(RATE, "1e-3"), ("finetuning.seed", "7")], (), (2,), 7)
    assert shared == ((RATE, "1e-3"),)
    assert [run.overrides for run in runs] == [(("finetuning.seed", "7"),), (("finetuning.seed", "8"),)]
    assert names(seeds=parse_seeds("5,3"), first_seed=7) == ["seed=5", "seed=3"]


def test_the_list_is_varied_with_everything_else(tmp_path):
    file = tmp_path / "runs.yml"
    file.write_text(f"- {{{LOSS}: grpo}}\n- {{{LOSS}: dapo, {RATE}: 1.0e-4}}\n- {{}}\n")
    entries = read_list(file)
    assert names(entries=entries) == ["loss.name=grpo", "loss.name=dapo,learning_rate=0.0001", "base"]
    assert names(entries=entries[1:], seeds=(1,)) == ["loss.name=dapo,learning_rate=0.0001,seed=0", "seed=0"]


HOSTILE = ["../../etc", "a/b", "..", ".", '""', "a b", "A", "a", "é", "\u202e", "CON", "x" * 400, "x" * 401, "-rf", "~"]


def test_names_are_distinct_and_safe_on_file_systems(tmp_path):
    values = ",".join(f"'{text}'" for text in HOSTILE)
    made = names([("workflow.text", values), ("llms.../x y.temperature", "1,1.5")], seeds=(2,))
    assert len(set(made)) == len(made) == 4 * len(HOSTILE)
    for name in made:
        assert len(name) <= 150 and name.isascii() and "/" not in name and name[0] not in ".-" and " " not in name
        (tmp_path / name).mkdir()


def test_a_value_that_looks_like_a_shortened_one_is_another():
    (long,) = (run.name.partition("=")[2] for run in make_grid([("a.b", f"{'y' * 120},1")], (), (), 0)[1][:1])
    assert len(set(names([("a.b", f"{'y' * 120},{long}")]))) == 2


def test_many_settings_make_a_name_of_bounded_length():
    made = names([(f"section.setting_{number}", f"{'v' * 30},w") for number in range(10)])
    assert len(set(made)) == 1024 and max(map(len, made)) <= 150


def test_paths_with_one_end_are_told_apart():
    assert names([("llms.a.lora.rank", "4,8"), ("llms.b.lora.rank", "4,8")])[:2] == [
        "a.lora.rank=4,b.lora.rank=4",
        "a.lora.rank=4,b.lora.rank=8",
    ]


@pytest.mark.parametrize(
    "value", ["grpo", "1", 1, 1e-5, True, None, "a,b", "", "it's", "a: b", "#x", [1, {"a": "b"}], "é"]
)
def test_values_of_a_list_are_passed_on_unchanged(value):
    text = yaml_text(value)
    assert "\n" not in text and parse_yaml(text, "") == value
    assert split_alternatives(text) == [text]


@pytest.mark.parametrize(
    ("settings", "seeds", "message"),
    [
        ([("a.b", "1,,2")], (), r"--set a\.b: alternative 2 of 3 is empty"),
        ([("a.b", "[1,2")], (), r"--set a\.b: wants a closing \]"),
        ([("a.b", "'x,y")], (), r"--set a\.b: wants a closing '"),
        ([("a.b", "1,2"), ("a.b", "3")], (), r"--set a\.b: is given twice"),
        ([("finetuning.seed", "1,2")], (2,), r"--set finetuning\.seed: is given twice"),
        ([("llms.judge.api_key", "sk-1,sk-2")], (), r"llms\.judge\.api_key: is a secret"),
        ([("llms.judge.base_url", "http://a:pw12@b,http://c")], (), r"base_url: is a secret"),
        ([("a.b", "1")], (), "nothing is varied"),
    ],
)
def test_faults_of_a_grid(settings, seeds, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_grid(settings, (), seeds, 0)
    assert "sk-1" not in str(caught.value) and "pw12" not in str(caught.value)


def test_a_secret_in_a_variable_may_be_varied():
    assert len(names([("llms.judge.api_key", "${KEY_A},${KEY_B}")])) == 2


@pytest.mark.parametrize("text", ["-1", "x", "", "1,", "1.5", "10001", "٣"])
def test_what_is_no_seeds(text):
    with pytest.raises(argparse.ArgumentTypeError, match="wants"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wants a list"),
        ("a: 1", "wants a list"),
        ("[]", "wants a list"),
        ("- a.b: 1\n- 2", "entry 2 is no mapping"),
        ("- a.b: .inf", "entry 1 has a value for"),
        ("- {", r"runs\.yml:1"),
    ],
)
def test_faults_of_a_list(tmp_path, text, message):
    (tmp_path / "runs.yml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_list(tmp_path / "runs.yml")


def test_a_path_is_varied_in_one_place():
    entries = [(("a.b", "1"),), (("a.b", "2"),)]
    with pytest.raises(ConfigError, match=r"--set a\.b: is given twice"):
        make_grid([("a.b", "3,4")], entries, (), 0)
    assert names([("a.b", "3")], entries) == ["b=1", "b=2"]

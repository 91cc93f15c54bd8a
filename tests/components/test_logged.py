"""Runs on logged rows: losses, validation, resume, groups by rewards, and what a builder refuses."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

import jaxft
from jaxft.cli import main
from jaxft.components.configs import LoggedTrajectoryBuilderConfig
from jaxft.components.logged_builder import LoggedTrajectoryBuilder
from jaxft.errors import ConfigError, DatasetError
from jaxft.harness.config import load_config
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.tokenizer import load_tokenizer

ROWS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i) * 3}]} for i in range(8)
]
PAIRS = [{"prompt": f"{i}?", "chosen": str(i) * 3, "rejected": "no"} for i in range(8)]
EACH = {"eval.validation.interval": 1}


def make_builder(rows, max_tokens=64, **fields):
    """Return a builder with rows."""
    tokenizer = load_tokenizer()
    template = ChatTemplate(tokenizer, (tokenizer.eos_token_id,))
    config = LoggedTrajectoryBuilderConfig(llm="policy", **fields)
    made = LoggedTrajectoryBuilder(config, template, max_tokens, vocabulary=300)
    items = [jaxft.EvalInputItem(id=str(index), full_dataset_entry=row) for index, row in enumerate(rows)]
    asyncio.run(made.bind_evaluation(None, items))
    return made


def collect(builder, ids=None):
    """Return the collection of these examples."""

    async def collected():
        await builder.start_run("run", {} if ids is None else {"example_ids": ids})
        return await builder.finalize("run")

    return asyncio.run(collected())


def test_recorded_ids_are_those_of_the_model():
    known = {"behavior_logprobs": [0, 0], "temperatures": [1, 1], "policy_versions": [0, 0]}
    sequence = {"tokens": [1, 300], "completion_mask": [False, True], "sampler_logprobs": [0, -1]} | known
    row = {"messages": [{"role": "user", "content": "?"}], "token_sequences": [sequence]}
    for wrong in (300, -3):
        sequence["tokens"][1] = wrong
        with pytest.raises(DatasetError, match=rf"row '0' has the token id {wrong}, and the model 300 ids"):
            make_builder([row])
    sequence["tokens"][1] = 299
    assert collect(make_builder([row])).trajectories[0][0].sequences[0].tokens == [1, 299]


@pytest.fixture(scope="module")
def imitated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft") / "run"
    return jaxft.sft(
        "qwen3-50k", ROWS, validation=ROWS[:2], num_updates=4, rows_per_update=4, output_dir=folder, overrides=EACH
    )


def test_supervised_training_lowers_the_loss_of_rows_and_of_held_out_rows(imitated):
    losses = [row["loss"] for row in imitated.history]
    validated = json.loads((imitated.output_dir / "validation_history.json").read_text())
    assert losses[-1] < losses[0] and validated[-1]["loss"] < validated[0]["loss"]
    assert [row["logged_rows"] for row in imitated.history] == [4] * 4
    assert abs(validated[0]["loss"] - losses[0]) < 0.2  # one model, of random weights
    assert imitated.rewards == [None] * 4


@pytest.mark.slow
def test_a_run_on_logs_goes_on_where_it_stopped(imitated, tmp_path):
    options = {"validation": ROWS[:2], "rows_per_update": 4, "output_dir": tmp_path / "run", "overrides": EACH}
    jaxft.sft("qwen3-50k", ROWS, num_updates=2, **options)
    again = jaxft.sft("qwen3-50k", ROWS, num_updates=4, resume=True, **options)
    names = ("training_metrics.jsonl",)
    assert all((again.output_dir / n).read_bytes() == (imitated.output_dir / n).read_bytes() for n in names)


def test_preferences_are_learned_and_measured(tmp_path):
    result = jaxft.dpo(
        "qwen3-50k", PAIRS, validation=PAIRS[:4], num_updates=3, rows_per_update=8, output_dir=tmp_path / "run"
    )
    assert abs(result.history[0]["loss"] - np.log(2)) < 1e-5 and result.history[-1]["preference_accuracy"] == 1.0
    first, last = json.loads((result.output_dir / "validation_history.json").read_text())
    assert abs(first["loss"] - np.log(2)) < 1e-5 and (last["loss"] < first["loss"], last["preference_accuracy"]) == (
        True,
        1.0,
    )


def test_rows_with_rewards_and_one_prompt_are_a_group():
    rows = [{"prompt": f"{i // 2}?", "completion": str(i), "reward": i} for i in range(4)]
    collection = collect(make_builder(rows))
    assert [[each.reward for each in group] for group in collection.trajectories] == [[0.0, 1.0], [2.0, 3.0]]
    assert [[each.generation for each in group] for group in collection.trajectories] == [[0, 1], [0, 1]]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    asked = [
        {"prompt": [*turns, {"role": "user", "content": text}], "completion": turns[1:], "reward": 1} for text in "xy"
    ]
    pairs = [pair | {"reward": 1.0} for pair in PAIRS[:2]]
    for rows in (asked, pairs):  # other last questions; pairs are no group
        assert [len(group) for group in collect(make_builder(rows)).trajectories] == [1, 1]
    assert [len(group) for group in collect(make_builder(ROWS), ["3", "1"]).trajectories] == [1, 1]


def test_long_rows_are_refused_dropped_or_cut():
    rows = [*ROWS[:2], {"text": "x" * 99}]
    with pytest.raises(DatasetError, match="row '2' has 100 tokens, and the context 64: raise max_context_tokens"):
        make_builder(rows)
    dropped, cut = (collect(make_builder(rows, long_rows=each)).metrics for each in ("drop", "truncate"))
    assert (dropped["logged_rows"], dropped["dropped_rows"], dropped["truncated_rows"]) == (2, 1, 0)
    assert (cut["logged_rows"], cut["dropped_rows"], cut["row_tokens_max"], cut["truncated_rows"]) == (3, 0, 64, 1)


def test_faulty_rows_are_named_five_at_once():
    with pytest.raises(DatasetError, match=r"row '0' has the columns a.*row '4' .*; 2 rows more have faults"):
        make_builder([{"a": 1}] * 7)
    with pytest.raises(DatasetError, match="some rows are preferences and some are not"):
        make_builder([ROWS[0], PAIRS[0]])
    for given, message in (("abc", r"rows\[0\] is 'a'"), ([], "wanted a list"), (ROWS[0], "wanted a dictionary|list")):
        with pytest.raises(DatasetError, match=message):
            jaxft.sft("qwen3-50k", given)


def test_rows_of_jaxft_are_refused_before_the_model_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    load_tokenizer().save_pretrained(tmp_path / "model")  # without weights
    for train, rows, options, message in (
        (jaxft.sft, [*ROWS, {"prompt": "q", "completion": ""}], {}, "rows: row '8' 'completion' is empty"),
        (jaxft.sft, PAIRS, {"max_length": 64}, "row '0' is a preference: jaxft.dpo learns from it"),
        (jaxft.dpo, ROWS, {}, "row '0' is no preference: jaxft.sft learns from it"),
        (jaxft.sft, ROWS, {"validation": PAIRS}, "validation: row '0' is a preference"),
    ):
        with pytest.raises(DatasetError, match=message):
            train("model", rows, **options)


@pytest.mark.parametrize("row, loss", [(ROWS[0], "sft"), (PAIRS[0], "dpo")])
def test_init_writes_a_run_for_a_file_of_logs(row, loss, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("logs.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["init", "--from", "logs.jsonl", "from_logs"]) == 0
    config = load_config("from_logs/run.yml")
    assert config.trainer_adapters["local"].loss.name == loss
    assert config.eval.general.dataset.file_path == tmp_path / "logs.jsonl"
    assert main(["init", "--from", "logs.jsonl", "from_logs"]) == 2 and "run.yml already" in capsys.readouterr().err
    Path("logs.jsonl").write_text('{"a": 1}\n')
    assert main(["init", "--from", "logs.jsonl", "other"]) == 2
    assert "logs.jsonl:1: has the columns a, of no form" in capsys.readouterr().err


def test_only_builders_of_episodes_need_a_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["init", "--from", "logs.jsonl", "from_logs"]) == 0
    with pytest.raises(ConfigError, match="finetuning: enabled, but without reward_function"):
        load_config("from_logs/run.yml", rewarded := [("trajectory_builders.rows", "{_type: grpo_trajectory_builder}")])
    with pytest.raises(ConfigError, match=r"reward_function; .* per_task: name one"):
        load_config("from_logs/run.yml", [*rewarded, ("finetuning.per_task", "{a: {}}")])


LOCAL = "trainer_adapters.local.loss"
NORMALIZED = "{reward_weights: {a: 1, b: 1}, multi_objective_aggregation: normalize_then_sum}"
MOVING = "{beta: 0.1, reference: {update_every: 1, mixing: 0.05}}"
GRPO, DPO, STOP = "{_type: grpo_trajectory_builder}", "{_type: dpo_trajectory_builder}", "trainers.loop.early_stop"


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Return a function that reads the run of `jaxft init --from`, with a reward function, and overrides."""
    monkeypatch.chdir(tmp_path)
    Path("logs.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert main(["init", "--from", "logs.jsonl", "from_logs"]) == 0
    judged = [
        ("eval.evaluators", "{right: {_type: environment_reward}}"),
        ("finetuning.reward_function", "{name: right}"),
    ]
    return lambda *overrides: load_config("from_logs/run.yml", [*judged, *overrides])


@pytest.mark.parametrize(
    ("builder", "loss", "more", "place", "way_out"),
    [
        (DPO, "{}", (), f"{LOCAL}.name: is 'grpo'", "set it to dpo"),
        (DPO, "{name: sft}", (), f"{LOCAL}.name: is 'sft'", "set it to dpo"),
        (GRPO, "{name: dpo}", (), f"{LOCAL}.name: is 'dpo'", "take dpo_trajectory_builder"),
        (
            f"{GRPO[:-1]}, failed_reward: -1}}",
            NORMALIZED,
            (),
            f"{LOCAL}.multi_objective_aggregation: ",
            "leave out one",
        ),
        (GRPO, MOVING, [("llms.policy.dtype", "bfloat16")], f"{LOCAL}.reference.mixing: is 0.05", "dtype to float32"),
        (GRPO, "{}", [("trainers.loop", "{_type: dpo_trainer}")], "trainers.loop: ", "take dpo_trajectory_builder"),
        (None, "{name: sft}", [(STOP, "{patience: 3}")], f"{STOP}: ", "leave it out, or set eval.validation"),
        (None, "{name: dpo}", [(STOP, "{patience: 3}")], f"{STOP}: ", "and finetuning.reward_function"),
        (None, "{}", [(STOP, "{target_reward: 0.5}")], f"{STOP}: ", "leave it out"),
        (None, "{distillation: {teacher: self}}", (), f"{LOCAL}.distillation: ", "leave it out"),
        (None, "{router_aux_loss_coef: 0.1}", (), f"{LOCAL}.router_aux_loss_coef: ", "leave it out"),
        (None, "{router_bias_update_rate: 0.1}", (), f"{LOCAL}.router_bias_update_rate: ", "leave it out"),
        (None, "{observation_coef: 0.1}", (), f"{LOCAL}.observation_coef: ", "leave it out"),
    ],
)
def test_settings_that_do_not_go_with_the_builder_are_refused(builder, loss, more, place, way_out, configure):
    with pytest.raises(ConfigError) as caught:
        configure((LOCAL, loss), *([("trajectory_builders.rows", builder)] if builder else ()), *more)
    (fault,) = caught.value.faults
    assert fault.startswith(place) and way_out in fault


def test_settings_that_go_with_the_builder_are_taken(configure):
    configure((LOCAL, "{name: dpo}"), ("trajectory_builders.rows", DPO))
    configure((LOCAL, NORMALIZED), ("trajectory_builders.rows", GRPO))
    configure((LOCAL, MOVING), ("trajectory_builders.rows", GRPO))
    configure((LOCAL, "{name: grpo}"), ("trajectory_builders.rows", f"{GRPO[:-1]}, failed_reward: -1}}"))
    dataset = ("eval.validation", "{dataset: {_type: jsonl, file_path: logs.jsonl}}")
    configure((LOCAL, "{name: sft}"), dataset, (STOP, "{patience: 3}"))  # by the reward of episodes
    # The adapter is not that of the run.
    configure(
        (LOCAL, "{observation_coef: 0.1}"),
        ("trainer_adapters.other", "{_type: local_trainer_adapter, llm: policy}"),
        ("finetuning.trainer_adapter", "other"),
    )

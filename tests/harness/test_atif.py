"""Episodes are written as ATIF and read again: every row is the same, and every document is one of the format."""

import importlib
import json
import random

import pytest

import jaxft
from jaxft.cli import main
from jaxft.components.configs import LoggedTrajectoryBuilderConfig
from jaxft.components.logged_builder import read_item
from jaxft.components.rollout_builder import to_messages
from jaxft.errors import DatasetError
from jaxft.harness.atif import read_atif, to_atif
from jaxft.harness.outcomes import EpisodeOutcome
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import TRAINING, Episode
from jaxft.rollout.sequences import TokenSequence, token_sequences

EXACT = {"tokens", "completion_mask", "sampler_logprobs", "behavior_logprobs", "policy_versions", "turns"}
CONFIG = LoggedTrajectoryBuilderConfig(llm="policy")
ANSWER = {"source": "agent", "message": "2"}
IDS = {"prompt_token_ids": [1], "completion_token_ids": [2]}
ASKED = {"source": "user", "message": "1 + 1?"}
CALL = {"tool_call_id": "a", "function_name": "add", "arguments": {"x": 1}}


def random_calls(rng, make_call):
    """Calls of some conversations of several models, with tools, branches and odd bytes."""
    calls, open_talks = [], []
    for index in range(rng.randint(1, 6)):
        talk = rng.choice(open_talks) if open_talks and rng.random() < 0.6 else None
        messages, ids, llm = talk or ((), [], rng.choice(["policy", "other"]))
        if messages and messages[-1].get("tool_calls"):
            asked = {"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": "41\x00\ufffd"}
        else:
            asked = {"role": "user", "content": f"question {rng.randrange(4)}"}
        begin = [{"role": "system", "content": "Be brief."}] if not messages and rng.random() < 0.5 else []
        messages = (*messages, *begin, asked)
        prompt = [*ids, *(rng.randrange(100) for _ in range(rng.randint(1, 4)))]
        tokens = [rng.randrange(100) for _ in range(rng.randint(1, 5))]
        said = b"answer \xc3(\xe2\x82" + rng.randbytes(4)  # no UTF-8, as of a token limit within a character
        given = {"content": said.decode(errors="replace"), "llm": llm, "messages": messages}
        if rng.random() < 0.3:
            arguments = rng.choice(['{"item": "sofa"}', '{"item": '])
            given["tool_calls"] = (ToolCall(f"call{index:05d}", "price", arguments),)
        call = make_call(
            index,
            prompt,
            tokens,
            finish_reason=rng.choice(["stop", "length"]),
            temperature=rng.choice([0.7, 1.0]),
            **given,
        )
        if rng.random() < 0.3:
            call.reply.completion.behavior_logprobs[0] -= 0.5
            call.reply.completion.supports.extend(["", "QQ"][rng.randrange(2)] for _ in tokens)
        calls.append(call)
        open_talks.append(((*messages, call.answer_message), [*prompt, *tokens], llm))
    return calls


def saved_episode(calls, reward, untargeted=()):
    """The row of `samples.jsonl` of an episode with these calls."""
    item = jaxft.EvalInputItem(id="sum", full_dataset_entry={})
    outcome = EpisodeOutcome(item, Episode(0, TRAINING, 0, "sum", 3, calls=calls))
    trajectory = jaxft.Trajectory(
        episode=to_messages(outcome),
        reward=reward,
        example_id="sum",
        generation=3,
        metadata={"finish_reasons": [call.reply.completion.finish_reason for call in calls]},
        sequences=token_sequences(calls, lambda call: call.index not in untargeted),
    )
    return {"epoch": 2} | json.loads(trajectory.model_dump_json())


@pytest.mark.parametrize(
    "package",
    [
        "atif",
        pytest.param("harbor.models.trajectories", marks=pytest.mark.atif),
        pytest.param("nat.atif", marks=pytest.mark.nat),
    ],
)
def test_200_random_episodes_give_the_same_rows_and_are_valid(make_call, tmp_path, package):
    """Each document is read as it is, and as models that others have of the format write it."""
    models, rng, several = importlib.import_module(package), random.Random(0), 0
    for _ in range(200):
        calls = random_calls(rng, make_call)
        untargeted = {call.index for call in calls[1:] if rng.random() < 0.2}
        saved = saved_episode(calls, rng.choice([0.25, None]), untargeted)
        document = json.loads(json.dumps(to_atif(saved, "run")))
        theirs = models.Trajectory.model_validate(document).model_dump_json(exclude_none=True)
        (tmp_path / "episodes.jsonl").write_text(f"{json.dumps(document)}\n{theirs}\n")
        wanted = [TokenSequence.model_validate(each) for each in saved["sequences"]]
        for row in read_atif(tmp_path / "episodes.jsonl"):
            item = jaxft.EvalInputItem(id="0", full_dataset_entry=row.fields)
            read = read_item(item, None, CONFIG)
            for mine, other in zip(wanted, read.sequences, strict=True):
                assert mine.model_dump(include=EXACT) == other.model_dump(include=EXACT)
                assert mine.supports == other.supports and other.is_logged and other.llm is None
            assert read.row.reward == (saved["reward"] if saved["scorable"] else None)
        several += "subagent_trajectories" in document
    assert 20 < several < 180


def test_calls_of_tools_and_their_results_are_steps(make_call):
    price = ToolCall("call00000", "price", '{"item": "sofa"}')
    given = {"tool_calls": (price,), "response_text": "Let me look.<tool_call>"}
    asks = make_call(0, [1], [2, 3], content="Let me look.", **given)
    result = {"role": "tool", "tool_call_id": "call00000", "content": "41"}
    answers = make_call(1, [1, 2, 3, 4], [5], content="41", messages=(*asks.messages, asks.answer_message, result))
    document = to_atif(saved_episode([asks, answers], 1.0), "run")
    user, agent, last = document["steps"]
    assert user == {"step_id": 1, "source": "user", "message": "question 0"}
    assert agent["message"] == "Let me look." and agent["metrics"]["completion_token_ids"] == [2, 3]
    assert agent["tool_calls"] == [
        {"tool_call_id": "call00000", "function_name": "price", "arguments": {"item": "sofa"}}
    ]
    assert agent["observation"] == {"results": [{"source_call_id": "call00000", "content": "41"}]}
    assert last["metrics"]["prompt_token_ids"] == [1, 2, 3, 4] and last["metrics"]["logprobs"] == [-101.0]


def written(tmp_path, *documents):
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json.dumps({"schema_version": "ATIF-v1.6"} | each) + "\n" for each in documents))
    return [row.fields for row in read_atif(path)]


def test_trajectories_without_ids_are_conversations_of_their_own(tmp_path):
    results = {"results": [{"source_call_id": "a", "content": "2"}]}
    looks = {"source": "agent", "message": [{"type": "text", "text": "Adding."}], "tool_calls": [CALL]}
    looks |= {"reasoning_content": "hm"}
    shown = {"source": "agent", "message": "as before", "is_copied_context": True}
    free = {"source": "agent", "message": "ls", "observation": {"results": [{"content": "a.txt"}]}}
    part = {"trajectory_id": "part", "steps": [ASKED, free]}
    document = {"steps": [ASKED, shown, ASKED, looks | {"observation": results}, ANSWER], "extra": {"reward": 0.5}}
    whole, other = written(tmp_path, document | {"subagent_trajectories": [part]})
    roles = [message["role"] for message in whole["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert whole["messages"][1]["weight"] == 0 and whole["messages"][3]["tool_calls"][0]["function"]["name"] == "add"
    assert [message.get("reasoning_content") for message in whole["messages"]] == [*[None] * 3, "hm", None, None]
    assert whole["reward"] == other["reward"] == 0.5 and "token_sequences" not in whole
    assert other["messages"] == [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "ls"}]


@pytest.mark.parametrize(
    "last",
    [
        ANSWER,  # NeMo Agent Toolkit: what the workflow has returned
        ANSWER | {"message": "two"},
        {"source": "agent", "message": "", "llm_call_count": 0, "tool_calls": [CALL]},  # NeMo Relay: a subagent
        ANSWER | {"is_copied_context": True},
    ],
)
def test_a_last_step_of_no_model_is_no_answer(tmp_path, last):
    (row,) = written(tmp_path, {"steps": [ASKED, ANSWER | {"model_name": "policy"}, last]})
    assert row["messages"] == [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def test_a_step_without_a_model_has_the_agents_unless_the_writer_repeats_that(tmp_path):
    named, final = ANSWER | {"model_name": "small"}, {"source": "agent", "message": "final"}
    steps = [ASKED, named, ASKED, final]
    (inherited,) = written(tmp_path, {"agent": {"model_name": "big"}, "steps": steps})
    assert [message["content"] for message in inherited["messages"]][1::2] == ["2", "final"]
    tool = {"source": "agent", "message": "", "tool_calls": [CALL]}
    (repeated,) = written(tmp_path, {"agent": {"model_name": "small"}, "steps": [ASKED, named, tool, final]})
    assert [message["content"] for message in repeated["messages"]] == ["1 + 1?", "2"]


def answered(**metrics):
    return {"steps": [ASKED, ANSWER | {"metrics": IDS | metrics}]}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"schema_version": "2"}, "schema_version: String should match pattern .*; holds '2'"),
        ({}, "steps: Field required"),
        ({"steps": []}, r"steps: List should have at least 1 item .*; holds \[\]"),
        ({"steps": [ASKED]}, "steps: no model has answered"),
        ({"steps": [ASKED, {"source": "robot", "message": ""}]}, r"steps\.1\.source: .*; holds 'robot'"),
        ({"steps": [{"source": "user", "message": None}]}, r"steps\.0\.message.*; holds None"),
        ({"steps": [{"source": "user", "message": [{"type": "image"}]}, ANSWER]}, r"steps\.0\.message\.0 is .*image"),
        ({"steps": [ANSWER | {"tool_calls": "x"}]}, r"steps\.0\.tool_calls: .* list; holds 'x'"),
        (
            {"steps": [ANSWER | {"tool_calls": [{"tool_call_id": "a"}]}]},
            r"tool_calls\.0\.function_name: Field required",
        ),
        ({"steps": [ANSWER | {"observation": {"results": ["a.txt"]}}]}, r"observation\.results\.0: .*; holds 'a.txt'"),
        ({"steps": [ANSWER], "subagent_trajectories": [1]}, r"subagent_trajectories\.0: .*; holds 1"),
        (answered(completion_token_ids=3), r"completion_token_ids: .* list; holds 3"),
        (answered(completion_token_ids=[-3]), r"completion_token_ids\.0: .* greater than or equal to 0; holds -3"),
        (answered(completion_token_ids=[2.0]), r"completion_token_ids\.0: .* integer; holds 2.0"),
        (answered(logprobs=[0.5]), r"logprobs\.0: .* less than or equal to .*; holds 0.5"),
        (answered(logprobs=[0, 0]), r"steps\.1\.metrics\.logprobs: 2 values for 1 completion_token_ids"),
        (answered(extra={"behavior_logprobs": [0, 0]}), r"extra\.behavior_logprobs: 2 values for 1"),
        (answered(extra={"policy_versions": 3}), r"extra\.policy_versions: .* list; holds 3"),
        (answered(extra={"turn": -1}), r"extra\.turn: .* greater than or equal to 0; holds -1"),
        (answered(extra={"temperature": -1}), r"extra\.temperature: .* greater than or equal to 0; holds -1"),
    ],
)
def test_what_is_no_trajectory_is_refused_in_one_line(tmp_path, document, said):
    with pytest.raises(DatasetError, match=rf"^\S*trajectories\.jsonl:1: [^\n]*{said}[^\n]*$"):
        written(tmp_path, document)


def test_what_may_be_null_or_missing_changes_nothing(tmp_path):
    bare = {"steps": [ASKED, ANSWER | {"metrics": {"extra": None}, "observation": {"results": None}}]}
    (row,) = written(tmp_path, bare | {"extra": None, "subagent_trajectories": None})
    assert [each["role"] for each in row["messages"]] == ["user", "assistant"] and row["reward"] is None
    (row,) = written(tmp_path, answered(logprobs=None, extra={"supports": None, "behavior_logprobs": None}))
    assert row["token_sequences"][0]["tokens"] == [1, 2]


def test_episodes_that_asked_no_model_are_left_out(make_call, tmp_path, capsys):
    file = tmp_path / "run" / "trajectories" / "samples.jsonl"
    file.parent.mkdir(parents=True)
    (tmp_path / "run" / "config.yml").write_text("")
    silent, spoken = saved_episode([], 0.0), saved_episode([make_call(0, [1], [2])], 1.0)
    for rows, code, said in (([silent], 2, "asked a model"), ([silent, spoken], 0, "1 left out, as they asked no")):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "atif"), "--atif"]) == code
        shown = capsys.readouterr()
        assert said in shown.out + shown.err
    assert [path.name for path in (tmp_path / "atif").iterdir()] == ["000000.json"]


def test_options_for_weights_do_not_fit_episodes(tmp_path, capsys):
    for option in (["--merge"], ["--dtype", "float32"]):
        assert main(["export", str(tmp_path), str(tmp_path / "out"), "--atif", *option]) == 2
        assert "leave out --merge and --dtype" in capsys.readouterr().err


@pytest.mark.slow
def test_the_episodes_of_a_run_train_another_one(tmp_path, capsys):
    run = jaxft.train(
        "qwen3-50k", lambda completion: len(completion) / 8, ["one?", "two?"], num_epochs=1, max_completion_length=8,
        num_generations=4, output_dir=tmp_path / "run",
    )  # fmt: skip
    assert main(["export", str(run.output_dir), str(tmp_path / "atif"), "--atif"]) == 0
    assert "3 episodes written" in capsys.readouterr().out
    assert main(["export", str(run.output_dir), str(tmp_path / "atif"), "--atif"]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    (tmp_path / "logs.jsonl").write_text('{"prompt": "one?", "completion": "1"}\n')
    assert main(["init", "--from", str(tmp_path / "logs.jsonl"), str(tmp_path / "again")]) == 0
    dataset = f"{{_type: atif, file_path: {tmp_path / 'atif'}}}"
    chosen = ["--set", f"eval.general.dataset={dataset}", "--set", f"finetuning.output_dir={tmp_path / 'out'}"]
    assert (
        main(
            ["finetune", "--config-file", str(tmp_path / "again" / "run.yml"), "--set", "eval.validation=null", *chosen]
        )
        == 0
    )
    rows = [json.loads(line) for line in (tmp_path / "out" / "training_metrics.jsonl").open()]
    assert rows[0]["logged_rows"] == 3 and rows[0]["applied_updates"] == 1

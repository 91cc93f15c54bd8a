import json

import pytest

from jaxft.harness.data_models import EvalInput, EvalInputItem, EvaluationRunOutput
from jaxft.harness.steps import (
    EpisodeSteps,
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    parse_to_openai_messages,
)
from jaxft.rollout.calls import Call, Completion, Prompt, Reply, recorded_call
from jaxft.rollout.messages import ToolCall
from jaxft.rollout.recorder import Episode


def user(text):
    return {"role": "user", "content": text}


def call(index, messages, content, tool_calls=(), functions=(), prompt_ids=None):
    completion = Completion([7, 8], [-0.5, -1.0], [-0.5, -1.0], [3, 3], "stop")
    prompt = Prompt("", prompt_ids or (index,))
    reply = Reply(content, completion, prompt.ids, index, tool_calls)
    return Call(index, "policy", tuple(messages), prompt, reply, functions=functions)


@pytest.fixture
def episode():
    """An agent that looks a city up and answers, then a critic with a conversation of its own."""
    asked = user("Where is Oslo?")
    look_up = ToolCall("abcdefghi", "look_up", '{"city": "Oslo"}')
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": look_up.id, "type": "function", "function": {"name": "look_up", "arguments": {"city": "Oslo"}}}
        ],
    }
    result = {"role": "tool", "tool_call_id": look_up.id, "content": "Norway"}
    episode = Episode(0, 0, 4, "e", 1, input_obj="Where is Oslo?")
    episode.record(call(0, [asked], "", tool_calls=(look_up,)))
    episode.record(call(1, [asked, called, result], "In Norway."))
    episode.record(call(2, [user("Is it right?")], "Yes.", functions=("review", "critic")))
    episode.texts_of_tokens["policy"] = {7: "In", 8: " Norway."}.__getitem__
    return episode


def test_steps_tell_calls_tools_and_functions(episode):
    steps = EpisodeSteps(episode, "In Norway.")
    assert [(step.event_type.value, step.name) for step in steps] == [
        ("WORKFLOW_START", "<workflow>"),
        ("LLM_START", "policy"),
        ("LLM_END", "policy"),
        ("TOOL_END", "look_up"),
        ("LLM_START", "policy"),
        ("LLM_END", "policy"),
        ("LLM_START", "policy"),
        ("LLM_END", "policy"),
        ("WORKFLOW_END", "<workflow>"),
    ]
    assert [step.function_ancestry.function_name for step in steps[3:8]] == ["<workflow>"] * 3 + ["critic"] * 2
    assert steps[-2].function_ancestry == InvocationNode(
        function_id="<workflow>/review/critic",
        function_name="critic",
        parent_id="<workflow>/review",
        parent_name="review",
    )
    assert (steps[3].data.input, steps[3].data.output) == ({"city": "Oslo"}, "Norway")
    assert steps[3].metadata == {"tool_call_id": "abcdefghi"}
    assert (steps[0].data.input, steps[-1].data.output) == ("Where is Oslo?", "In Norway.")
    assert steps[1].UUID == steps[2].UUID != steps[4].UUID
    assert (steps[0].parent_id, steps[1].parent_id) == ("root", steps[0].UUID)
    assert [step.event_state.value for step in steps[1:4]] == ["START", "END", "END"]
    assert [step.event_category.value for step in steps[2:4]] == ["LLM", "TOOL"]
    assert [IntermediateStep.model_validate_json(step.model_dump_json()).name for step in steps] == [
        step.name for step in steps
    ]


def test_messages_are_said_once_and_record_their_calls(episode):
    messages = parse_to_openai_messages(EpisodeSteps(episode, None))
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "Where is Oslo?"),
        ("assistant", ""),
        ("tool", "Norway"),
        ("assistant", "In Norway."),
        ("user", "Is it right?"),
        ("assistant", "Yes."),
    ]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"city": "Oslo"}'}
    assert messages[2]["tool_call_id"] == "abcdefghi"
    assert [entry["token"] for entry in messages[3]["logprobs"]["content"]] == ["In", " Norway."]
    recorded = [recorded_call(message["logprobs"]) for message in messages if message["role"] == "assistant"]
    assert [(each.index, each.prompt_ids, each.token_ids, each.functions) for each in recorded] == [
        (0, (0,), (7, 8), ()),
        (1, (1,), (7, 8), ()),
        (2, (2,), (7, 8), ("review", "critic")),
    ]


def test_tokens_of_a_model_without_texts_are_named_by_their_ids(episode):
    episode.texts_of_tokens.clear()
    answer = parse_to_openai_messages(EpisodeSteps(episode, None))[1]
    assert [entry["token"] for entry in answer["logprobs"]["content"]] == ["token_id:7", "token_id:8"]


def test_candidates_are_steps_of_the_function_they_were_made_in():
    episode = Episode(0, 0, 0, "e", 0)
    for index, content in enumerate(("north", "south")):
        episode.record(call(index, [user("Go!")], content, functions=("dpo_candidate_move",), prompt_ids=(5,)))
    episode.record(call(2, [user("Go on!")], "east"))
    answers = [type("Answer", (), {"call_index": index}) for index in range(2)]
    episode.record_candidates(answers, [0.25, 1.0])
    found = [step for step in EpisodeSteps(episode, None) if step.event_category == "TTC"]
    assert [(step.name, step.data.turn_id, step.data.candidate_index, step.data.score) for step in found] == [
        ("dpo_candidate_move", "0", 0, 0.25),
        ("dpo_candidate_move", "0", 1, 1.0),
    ]
    assert [(step.data.input, step.data.output) for step in found] == [
        ([user("Go!")], "north"),
        ([user("Go!")], "south"),
    ]


def test_steps_written_by_hand_are_parsed_too():
    def step(event_type, **data):
        payload = IntermediateStepPayload(event_type=event_type, data=StreamEventData(**data), framework="langchain")
        ancestry = InvocationNode(function_id="1", function_name="agent")
        return IntermediateStep(parent_id="root", function_ancestry=ancestry, payload=payload)

    steps = [
        step(IntermediateStepType.LLM_START, input="Where is Oslo?"),
        step(IntermediateStepType.LLM_NEW_TOKEN, chunk="look"),
        step(IntermediateStepType.LLM_END, output="look_up(Oslo)"),
        step(IntermediateStepType.TOOL_END, output="Norway"),
        step(IntermediateStepType.LLM_END, output="In Norway."),
    ]
    assert parse_to_openai_messages(steps) == [
        user("Where is Oslo?"),
        {"role": "assistant", "content": "look_up(Oslo)", "logprobs": {}},
        {"role": "tool", "content": "Norway", "tool_call_id": ""},
        {"role": "assistant", "content": "In Norway.", "logprobs": {}},
    ]


def test_steps_are_made_when_they_are_read_and_never_written(episode):
    item = EvalInputItem(id="e", full_dataset_entry={})
    found = item.model_copy(update={"trajectory": EpisodeSteps(episode, None)})
    output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=[found]), evaluation_results=[])
    assert output.eval_input.eval_input_items[0].trajectory is found.trajectory
    assert json.loads(output.model_dump_json())["eval_input"]["eval_input_items"] == [item.model_dump()]
    assert "trajectory" not in item.model_dump()
    assert "_steps" not in vars(found.trajectory)
    assert len(found.trajectory) == 9 and "_steps" in vars(found.trajectory)
    again = EvalInputItem(id="e", full_dataset_entry={}, trajectory=found.trajectory)
    assert isinstance(again.trajectory, list) and found.trajectory == again.trajectory

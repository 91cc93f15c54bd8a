import pytest

from jaxft.errors import RequestError
from jaxft.rollout.messages import canonical_messages, check_tools, comparison_key

CALL = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "look_up"}}


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_all_spellings_of_a_message_have_one_form():
    canonical = canonical_messages([{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert canonical[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    for message in (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "refusal": None, "function_call": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": [], "annotations": [], "tool_calls": (CALL,)},
        {"role": "assistant", "content": [{"type": "text", "text": ""}], "tool_calls": [CALL]},
        canonical[0],
    ):
        assert canonical_messages([message]) == canonical


def test_texts_of_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert canonical_messages([{"role": "assistant", "content": parts}])[0]["content"] == "a\nb"


def test_an_assistant_may_say_nothing():
    assert canonical_messages([{"role": "assistant", "content": None}]) == ({"role": "assistant", "content": ""},)


def test_roles_and_ids_are_no_part_of_the_meaning():
    def meaning(**message):
        return comparison_key(canonical_messages([message])[0])

    assert meaning(role="developer", content="x") == meaning(role="system", content="x")
    assert meaning(role="function", content="x", name="f") == meaning(role="tool", content="x", name="f")
    assert meaning(role="tool", content="x", tool_call_id="1") == meaning(role="tool", content="x", tool_call_id="2")
    other = {**CALL, "id": "b"}
    called = meaning(role="assistant", content=" ", tool_calls=[CALL])
    assert called == meaning(role="assistant", content=None, tool_calls=[other])
    assert called != meaning(role="assistant", content=None, tool_calls=[CALL, other])
    assert meaning(role="user", content="x") != meaning(role="user", content="x ")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0]"),
        ({"role": 3, "content": "x"}, "messages[0]"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "user", "content": 3}, "messages[0]['content']"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0]['content']"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0]['content']"),
        ({"role": "user", "content": "ab\ud83d"}, "messages[0]['content']"),
        ({"role": "user", "content": "x", "extra": {"a": 1}}, "messages[0]"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0]"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "messages[0]"),
        ({"role": "assistant", "content": "", "tool_calls": {"a": 1}}, "messages[0]"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "\udc00"}}}]},
            "messages[0].tool_calls[0]",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(100)}}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(message, param):
    with pytest.raises(RequestError) as refused:
        canonical_messages([message])
    assert refused.value.param == param and param.partition("[")[0] in str(refused.value)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user", "content": "x"}, None])
def test_what_is_no_list_of_messages_is_refused(messages):
    with pytest.raises(RequestError) as refused:
        canonical_messages(messages)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function"}],
        [{"type": "custom", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "é"}}],
        [{"type": "function", "function": {"name": "f", "description": 3}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"a": {1, 2}}}}],
        [{"type": "function", "function": {"name": "f", "parameters": nested(100)}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"\ud800": 1}}}],
        [3],
    ],
)
def test_malformed_tools_are_refused_by_name(tools):
    with pytest.raises(RequestError) as refused:
        check_tools([TOOL, *tools])
    assert refused.value.param == "tools[1]"


def test_lists_of_tools_are_checked():
    check_tools([TOOL])
    for tools in ([TOOL, TOOL], "look_up", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]):
        with pytest.raises(RequestError):
            check_tools(tools)

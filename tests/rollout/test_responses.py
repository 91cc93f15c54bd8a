"""Formats of model families: what an answer says, and how a conversation goes on from its sampled ids."""

import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxft.errors import RequestError, ToolsUnsupportedError
from jaxft.rollout.calls import Call, Completion, Reply
from jaxft.rollout.chat import ChatTemplate
from jaxft.rollout.messages import canonical_messages
from jaxft.rollout.responses import ParsedAnswer, ResponseFormat, number_tool_calls
from jaxft.rollout.streaming import StopFinder, Streamer, find_stop, find_thoughts

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"

QWEN = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
INSTRUCT = ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"]
SPECIAL = dict.fromkeys(("qwen3", "hermes", "smollm3", "qwen3_5"), QWEN) | {
    "llama3": {"eos_token": "<|eot_id|>", "additional_special_tokens": HEADERS},
    "mistral": {"eos_token": "</s>", "additional_special_tokens": INSTRUCT},
    "ministral": {"eos_token": "</s>", "additional_special_tokens": [*INSTRUCT, "[ARGS]"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
OSLO = ("weather", '{"city": "Oslo"}')
BERN = ("time", '{"city": "Bern"}')

CALLS = {
    "jaxft": ['<call:weather>{"city": "Oslo"}</call>', '<call:time>{"city":"Bern"}</call>'],
    "qwen3": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>{"arguments":{"city":"Bern"},"name":"time"}</tool_call>',
    ],
    "llama3": [
        '{"name": "weather", "parameters": {"city": "Oslo"}}',
        '{"name": "time", "arguments": {"city": "Bern"}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS][{"name":"time","arguments":{"city":"Bern"},"id":"abcdefghi"}]',
    ],
}
CALLS["hermes"] = CALLS["smollm3"] = CALLS["qwen3"]
CALLS["ministral"] = ['[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', '[TOOL_CALLS]time[ARGS]{"city":"Bern"}']
FAMILIES = sorted(CALLS)


def test_a_control_token_of_any_script_is_kept_where_a_template_names_it():
    names = {1: "<｜ende｜>", 2: "<｜anders｜>"}
    template = {"fields": {"content": {"close": names[1]}}}
    made = ResponseFormat(
        SimpleNamespace(response_template=template, get_chat_template=lambda **_: ""),
        SimpleNamespace(control_ids=frozenset(names), decoded_text=names.get),
        (),
    )
    assert made._skipped_ids == {2}


def make_template(family, tokenizer, chat_template=None):
    """A byte-level tokenizer with the control tokens and the chat template of a family."""
    if family == "jaxft":
        return ChatTemplate(tokenizer, (tokenizer.eos_token_id,))
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    text = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8") if chat_template is None else chat_template
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=text, **SPECIAL[family])
    return ChatTemplate(made, (made.eos_token_id,))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def template(family, tokenizer):
    return make_template(family, tokenizer)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def sample(template, messages, text, earlier=(), tools=TOOLS, end=True):
    """The call in which the model answers with this text, in which names of control tokens are control tokens."""
    prompt = template.prompt(messages, earlier, tools=tools)
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"] + [template.stop_ids[0]] * end
    answer = template.responses.parse(template.responses.text(ids), prompt.text, has_tools=bool(tools))
    tool_calls, thought = number_tool_calls(answer, len(earlier)), answer.reasoning_content
    reply = Reply(
        answer.content, Completion(ids), prompt.ids, len(earlier), tool_calls, thought, answer.is_malformed, text
    )
    return Call(len(earlier), "policy", canonical_messages(messages), prompt, reply)


def told(call, **fields):
    """The message that an agent sends back for a call."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [each.as_message() for each in call.reply.tool_calls],
    } | fields


def result(call, content="3"):
    return {"role": "tool", "content": content, "tool_call_id": call.reply.tool_calls[0].id, "name": "weather"}


def parse(template, text, has_tools=True):
    prompt = template.prompt([user("?")], tools=TOOLS if has_tools else ())
    return template.responses.parse(text, prompt.text, has_tools=has_tools)


@pytest.mark.parametrize("separator", ["", "\n"])
def test_calls_are_parsed(family, template, separator):
    first, second = CALLS[family]
    assert parse(template, first) == ParsedAnswer("", None, (OSLO,))
    assert parse(template, second) == ParsedAnswer("", None, (BERN,))
    assert parse(template, first, has_tools=False) == ParsedAnswer(first)
    if family == "llama3":  # its calls are whole answers, and its templates take a single one back
        text = f"{first}; {second}"
        assert parse(template, text) == ParsedAnswer(text, is_malformed=True)
        return
    assert parse(template, "I look.\n" + first) == ParsedAnswer("I look.", None, (OSLO,))
    text = first + separator + second
    if family == "mistral":
        text = first[:-1] + ", " + second.removeprefix("[TOOL_CALLS][")
    assert parse(template, text).tool_calls == (OSLO, BERN)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda call: call.replace("}", "", 1),
        lambda call: call.replace('"Oslo"', "Oslo"),
        lambda call: call.replace('{"city": "Oslo"}', '["Oslo"]'),
        lambda call: call.replace('{"city": "Oslo"}', "7"),
        lambda call: call.replace('{"city": "Oslo"}', '["ab", "cd"]'),
        lambda call: call.replace('{"city": "Oslo"}', "[]"),
        lambda call: call.replace("weather", "weather<|end|").replace("<call:weather<|end|>", "<call:weather>{"),
        lambda call: call.replace('"Oslo"', "NaN"),
        lambda call: call.replace('"Oslo"', '"\\ud800"'),
        lambda call: call.replace('"Oslo"', "[" * 3000 + "]" * 3000),
        lambda call: call[: len(call) // 2 + 8],
    ],
)
def test_a_malformed_call_is_text(family, template, spoil):
    text = spoil(CALLS[family][0])
    assert parse(template, text) == ParsedAnswer(text, is_malformed=True)
    good = CALLS[family][1]
    if family != "llama3" and good[:5] in text:  # Llama's one call is the whole answer
        assert parse(template, good + text) == ParsedAnswer(good + text, is_malformed=True)


SPACES = {
    "jaxft": '<call:weather> {\n "city" : "Oslo" }\n</call>',
    "qwen3": '<tool_call>{"id": "1", "arguments":\t{"city":"Oslo"} , "name": "weather"}\n\n</tool_call>',
    "llama3": '\n<|python_tag|> {"type" :"function","parameters":{"city":"Oslo"},"name":"weather"} \n',
    "mistral": '[TOOL_CALLS]\n[ {"parameters": "{\\"city\\": \\"Oslo\\"}", "name": "weather"} ]\n',
    "ministral": '[TOOL_CALLS] weather[CALL_ID]a1[ARGS] {"city" : "Oslo"} ',
}
SPACES["hermes"] = SPACES["smollm3"] = SPACES["qwen3"]


def test_what_carries_no_meaning_makes_no_call_malformed(family, template):
    assert parse(template, SPACES[family]) == ParsedAnswer("", None, (OSLO,))


def test_a_second_list_of_mistrals_older_models_is_read(tokenizer):
    template = make_template("mistral", tokenizer)
    first, second = CALLS["mistral"]
    assert parse(template, first + second).tool_calls == (OSLO, BERN)
    for spoilt in (first + second[:-1], first + " and " + second, "[TOOL_CALLS] []", "[TOOL_CALLS] [1]"):
        assert parse(template, spoilt) == ParsedAnswer(spoilt, is_malformed=True)


@pytest.mark.parametrize("first", ["name", "parameters", "type"])
def test_llamas_keys_may_have_any_order(tokenizer, first):
    template = make_template("llama3", tokenizer)
    call = {"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}
    for last in set(call) - {first}:
        keys = [first, *(set(call) - {first, last}), last]
        assert parse(template, json.dumps({key: call[key] for key in keys})).tool_calls == (OSLO,)
        cut = json.dumps({key: call[key] for key in keys})[:-2]
        assert parse(template, cut) == ParsedAnswer(cut, is_malformed=True)
    for answer in ('{"type": "circle", "name": "c", "parameters": {}}', '{"city": "Oslo"}'):
        assert parse(template, answer) == ParsedAnswer(answer)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda call: call.replace('{"city": "Oslo"}', '{"city": "Rome", "city": "Oslo"}'),
        lambda call: call.replace('"Oslo"', "1e999"),
        lambda call: call.replace('{"city": "Oslo"}', '{}, "city": "Oslo"'),
        lambda call: call.replace('{"city": "Oslo"}', '{"city": "Oslo"}, "arguments": {}, "parameters": {}'),
        lambda call: call.replace('{"city": "Oslo"}', '{"city": "Oslo"} {}'),
        lambda call: call.replace("</call>", "").replace("\n</tool_call>", "").replace("}]", "}").replace("}}", "}"),
        lambda call: call + "</call></tool_call>",
    ],
)
def test_no_part_of_a_call_is_left_out(family, template, spoil):
    text = spoil(CALLS[family][0])
    if text != CALLS[family][0]:
        assert parse(template, text) == ParsedAnswer(text, is_malformed=True)


def test_a_tool_that_a_choice_forces_is_called(family, template):
    before = template.responses.forced_call("weather")
    closed = {"jaxft": "</call>", "llama3": "}", "mistral": "}]", "ministral": ""}.get(family, "}\n</tool_call>")
    assert parse(template, before + '{"city": "Oslo"}' + closed).tool_calls == (OSLO,)
    assert before.startswith(template.responses.forced_call(None))


def test_reasoning_is_apart(tokenizer):
    template = make_template("qwen3", tokenizer)
    text = "<think>\nhm\n</think>\n\nYes. "
    assert parse(template, text, has_tools=False) == ParsedAnswer("Yes. ", "hm")
    assert parse(template, text + CALLS["qwen3"][0]) == ParsedAnswer("Yes.", "hm", (OSLO,))
    assert parse(template, "<think>\nhm") == ParsedAnswer("", "hm")
    assert parse(template, text + "<tool_call>{</tool_call>") == ParsedAnswer(
        "Yes. <tool_call>{</tool_call>", "hm", (), True
    )
    prompt = template.prompt([user("?")]).text + "<think>\n"
    assert template.responses.parse("hm\n</think>\n\nYes.", prompt, has_tools=False) == ParsedAnswer("Yes.", "hm")


TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"


def parse_tags(template, text, tools=TOOLS, **kwargs):
    prompt = template.prompt([user("?")], tools=tools, template_kwargs=kwargs)
    return template.responses.parse(text, prompt.text, has_tools=True, tools=tools)


def test_calls_in_tags_are_parsed(tokenizer):
    template = make_template("qwen3_5", tokenizer)
    assert parse_tags(template, f"hm\n</think>\n\n{TAGS}") == ParsedAnswer("", "hm", (OSLO,))
    second = TAGS.replace("weather", "time").replace("Oslo", "Bern")
    text = f"I look.\n\n{TAGS}\n{second}"
    assert parse_tags(template, text, enable_thinking=False) == ParsedAnswer("I look.", None, (OSLO, BERN))
    for cut in (text[:-5], TAGS[: TAGS.index("Oslo") + 2]):
        assert parse_tags(template, cut, enable_thinking=False) == ParsedAnswer(cut, is_malformed=True)
    forced = template.responses.forced_call("weather")
    assert TAGS.startswith(forced) and forced.startswith(template.responses.forced_call(None))
    for kwargs, start in (({}, f"\n</think>\n\n{forced}"), ({"enable_thinking": False}, forced)):
        asked = template.prompt([user("?")], tools=TOOLS, template_kwargs=kwargs)
        begun = template.prompt([user("?")], tools=TOOLS, template_kwargs=kwargs, prefill=forced)
        assert begun.text == asked.text and template.text(begun.ids) == asked.text + start
        assert template.forced_start(forced, asked.text) == start
        called = parse_tags(template, start + TAGS.removeprefix(forced), **kwargs)
        assert called == ParsedAnswer("", None, (OSLO,))


def test_arguments_in_tags_have_the_types_of_the_tool(tokenizer):
    template = make_template("qwen3_5", tokenizer)
    types = {"days": "integer", "city": "string", "units": "array", "now": "boolean"}
    parameters = {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    values = {"days": "3", "city": "7", "units": '["C"]', "now": "true", "more": "8"}
    tags = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"
    ((name, arguments),) = parse_tags(template, text, tools, enable_thinking=False).tool_calls
    assert json.loads(arguments) == {"days": 3, "city": "7", "units": ["C"], "now": True, "more": "8"}
    assert name == "weather"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n</parameter>", ""),
        ("\n</function>", ""),
        ("\n</tool_call>", ""),
        ("<tool_call>\n", ""),
        ("<function=weather>\n", ""),
        ("<parameter=city>\n", ""),
        ("Oslo", "Oslo\n</parameter>\n<parameter=city>\nBern"),
        ("Oslo", "Oslo\n<parameter=time>\n3"),
        ("Oslo", "a\n</parameter>\n</function>\n</tool_call>\nb"),
        ("<parameter", "so\n<parameter"),
        ("</function>", "so\n</function>"),
    ],
)
def test_tags_that_are_missing_or_too_many_make_a_call_malformed(tokenizer, old, new):
    template, spoilt = make_template("qwen3_5", tokenizer), TAGS.replace(old, new)
    for text in (spoilt, f"{TAGS}\n{spoilt}", f"{spoilt}\n{TAGS}"):
        answer = parse_tags(template, text, enable_thinking=False)
        assert answer == ParsedAnswer(text, is_malformed=True)


def test_spaces_between_tags_carry_no_meaning_and_those_of_a_value_do(tokenizer):
    template = make_template("qwen3_5", tokenizer)
    text = "<tool_call><function=weather><parameter=city> Oslo\n\n</parameter>\n\n</function> </tool_call>"
    ((_, arguments),) = parse_tags(template, text, enable_thinking=False).tool_calls
    assert json.loads(arguments) == {"city": " Oslo\n"}


MARKS = [
    *("</parameter>", "<parameter=b>", "</function>", "<function=f>", "<tool_call>", "</tool_call>", "</call>"),
    *("<call:f>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>", "{", "}", "]", '"', "\\"),
    *("\n", " ", "a", "é", "\t", "1", "true"),
]
TEXTS = st.lists(st.sampled_from(MARKS), max_size=6).map("".join)
VALUES = st.one_of(TEXTS, st.integers(0, 99), st.booleans(), st.none(), st.lists(TEXTS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "ab", "a b"]), VALUES, max_size=3)
TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", list: "array"}
AMBIGUOUS = re.compile(r"<parameter=|</parameter>\s*</function>\s*</tool_call>")
ALL_TEMPLATES = ["jaxft", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
made_before = functools.cache(make_template)


def rendered(template, calls, content, reasoning):
    """A prompt, and what the chat template writes for an answer to it, without its end token."""
    called = [
        {"id": f"{number:09}", "type": "function", "function": {"name": name, "arguments": given}}
        for number, (name, given) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "reasoning_content": reasoning or "", "tool_calls": called}
    render = functools.partial(template.tokenizer.apply_chat_template, tokenize=False, tools=TOOLS)
    prompt = render([user("?")], add_generation_prompt=True)
    return prompt, render([user("?"), answer]).removeprefix(prompt).rpartition(template.tokenizer.eos_token)[0]


def without_meaning(text):
    """A text without spaces, and without the ids that Mistral's templates write."""
    return re.sub(r',"id":"\d*"', "", "".join(text.split()))


def streamed(template, text, prompt_text, answer, sizes):
    """Content and reasoning of the deltas of a text that is sampled in pieces of these sizes."""
    deltas, sent, has_tools = [], 0, template.responses.template(has_tools=True)
    streamer = Streamer(
        *(0, deltas.append, lambda ids: "".join(map(chr, ids))),
        **{"stops": (), "template": has_tools, "prompt_text": prompt_text, "prefill": ""},
    )
    for size in itertools.cycle(sizes):
        streamer.feed([ord(character) for character in text[sent : sent + size]], [])
        sent += size
        if sent >= len(text):
            break
    streamer.finish(answer)
    return "".join(each.content for each in deltas), "".join(each.reasoning_content for each in deltas)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted({*ALL_TEMPLATES} & {*FAMILIES, "qwen3_5"})),
    given_arguments=st.lists(ARGUMENTS, min_size=1, max_size=3),
    content=st.sampled_from(["", "I look.", "Why < 3?\n\nSo."]),
    reasoning=st.sampled_from([None, "hm", "a\n<tool_call>\n</parameter>"]),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    cut=st.one_of(st.none(), st.tuples(st.floats(0, 1), st.integers(1, 30))),
)
def test_calls_are_read_as_the_template_writes_them(tokenizer, name, given_arguments, content, reasoning, sizes, cut):
    """Calls that are written and read again are equal; what a cut leaves is read as it stands there, or is text."""
    template = made_before(name, tokenizer)
    calls = [(f"f{number}", given) for number, given in enumerate(given_arguments)][: 1 if name == "llama3" else 3]
    content = "" if name in ("llama3", "mistral") else content
    reasoning = reasoning if name in ("qwen3", "qwen3_5") else None
    tools = []
    for function, values in calls:
        properties = {key: {"type": TYPES[type(value)]} for key, value in values.items()}
        tools.append({"type": "function", "function": {"name": function, "parameters": {"properties": properties}}})
    prompt, text = rendered(template, calls, content, reasoning)
    if cut is not None:
        first = text.index("</think>") + len("</think>") if reasoning or name == "qwen3_5" else 0
        start = first + int(cut[0] * (len(text) - first))
        text = text[:start] + text[start + cut[1] :]
        # In JSON, the first is a slash by another name; tags of reasoning are some in what is left of a call.
        assume("\\/" not in text and "think>" not in text[first:])
    answer = template.responses.parse(text, prompt, has_tools=True, tools=tools)
    assert streamed(template, text, prompt, answer, sizes) == (answer.content, answer.reasoning_content or "")
    read = [(function, json.loads(arguments)) for function, arguments in answer.tool_calls]
    if cut is None and not (name == "qwen3_5" and AMBIGUOUS.search(str(given_arguments).replace("\\n", "\n"))):
        assert (answer.content, answer.reasoning_content, read) == (content, reasoning, calls)
        assert [list(map(type, each.values())) for _, each in read] == [list(map(type, g.values())) for _, g in calls]
    elif answer.tool_calls:
        again = rendered(template, read, answer.content, answer.reasoning_content)[1]
        # No character is lost or new; templates write the content before the calls, behind which it may stand, too.
        assert sorted(without_meaning(again)) == sorted(without_meaning(text))


def test_every_template_has_a_format_of_calls_or_refuses_tools(tokenizer):
    for name in ALL_TEMPLATES:
        if name not in CALLS and name != "qwen3_5":
            text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
            with pytest.raises(ToolsUnsupportedError, match="response_template"):
                make_template("hermes", tokenizer, text).responses.template(has_tools=True)


@pytest.mark.parametrize("thought", ["hm\n</think>\n\n", "\n</think>\n\n"])
@pytest.mark.parametrize("said", [TAGS, "Cold."])
def test_turns_stay_token_exact_where_the_prompt_begins_the_thought(tokenizer, thought, said):
    template = make_template("qwen3_5", tokenizer)
    call = sample(template, [user("Weather?")], thought + said)
    assert call.content == ("" if call.reply.tool_calls else "Cold.") and (call.reply.reasoning_content == "hm") == (
        "hm" in thought
    )
    answer = told(call, content=call.content or None) if call.reply.tool_calls else assistant(call.content)
    # A question of the user's would make the template leave out the reasoning before it.
    history = [user("Weather?"), answer, {"role": "tool", "content": "3 degrees", "tool_call_id": "123456789"}]
    prompt = template.prompt(history, [call], tools=TOOLS)
    assert prompt.ids[: len(call.context_ids)] == call.context_ids and not prompt.is_retokenized
    later = template.prompt([*history, assistant("So."), user("And Bern?")], [call], tools=TOOLS)
    assert later.is_retokenized


def test_a_variable_switches_reasoning_off(tokenizer):
    template = make_template("smollm3", tokenizer)
    on, off = (
        template.prompt([user("?")], template_kwargs={"enable_thinking": thinks}).text for thinks in (True, False)
    )
    assert "/think" in on and on.endswith("assistant\n")
    assert "/no_think" in off and off.endswith("<think>\n\n</think>\n")
    system = {"role": "system", "content": "/no_think Be short."}
    messages = [system, user("?")]
    call = sample(template, messages, "Yes.", tools=())
    prompt = template.prompt([*messages, assistant("Yes."), user("!")], [call])
    assert prompt.text.startswith(off[: off.index("<|im_end|>")] + "Be short.")
    assert prompt.ids[: len(call.context_ids)] == call.context_ids


def test_a_tokenizer_may_bring_its_own_response_template(tokenizer):
    template = make_template("hermes", tokenizer, "{{ messages[0].content }}>>")
    with pytest.raises(RequestError, match="response_template") as refused:
        parse(template, "x")
    assert refused.value.param == "tools"
    template.tokenizer.response_template = {
        "start_anchor": ">>",
        "fields": {
            "content": {},
            "tool_calls": {"open": "!", "content": "json", "repeats": True, "transform": {"function": "{content}"}},
        },
    }
    own = ChatTemplate(template.tokenizer, template.stop_ids)
    assert parse(own, '!{"name": "weather", "arguments": {"city": "Oslo"}}').tool_calls == (OSLO,)
    with pytest.raises(RequestError, match="auto"):
        own.responses.forced_call(None)


def test_a_template_that_refuses_tools_is_told_from_one_that_refuses_messages(tokenizer):
    own = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content + '' }}"
    template = make_template("hermes", tokenizer, own)
    assert template.prompt([user("?")]).text == "?"
    with pytest.raises(ToolsUnsupportedError, match="no tools") as refused:
        template.prompt([user("?")], tools=TOOLS)
    assert refused.value.param == "tools" and refused.value.exit_code == 2
    one_turn = make_template("hermes", tokenizer, "{% if messages[1:] %}{{ raise_exception('one') }}{% endif %}?")
    with pytest.raises(RequestError, match="user, user: one") as refused:
        one_turn.prompt([user("?"), user("!")], tools=TOOLS)
    assert refused.value.param == "messages" and not isinstance(refused.value, ToolsUnsupportedError)


def with_calls(message, change):
    return {**message, "tool_calls": [{**call, **change(call["function"])} for call in message["tool_calls"]]}


def compact(function):
    return {"function": {**function, "arguments": json.dumps(json.loads(function["arguments"]))}}


WRITINGS = {
    "as it is": lambda message: message,
    "with null": lambda message: message | {"content": message["content"] or None, "refusal": None, "annotations": []},
    "without content": lambda message: {name: value for name, value in message.items() if name != "content" or value},
    "with parts": lambda message: message | {"content": [{"type": "text", "text": message["content"]}]},
    "compact arguments": lambda message: with_calls(message, compact),
    "other ids": lambda message: with_calls(message, lambda function: {"id": "123456789"}),
}


@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
@pytest.mark.parametrize("spelling", [0, 1])
def test_turns_with_calls_stay_token_exact(family, template, write, spelling):
    messages, calls = [user("Weather?")], []
    for turn in range(3):
        call = sample(template, messages, CALLS[family][spelling], calls)
        assert not call.prompt.is_retokenized
        if calls:
            known = calls[-1].context_ids
            assert call.prompt_ids[: len(known)] == known
            # Only the spelling of the calls differs from the rendered conversation.
            rest = template.tokenizer.decode(call.prompt_ids[len(known) :])
            assert call.prompt.text.endswith(rest) and f"{turn - 1} degrees" in rest
        calls.append(call)
        messages = [*messages, write(told(call, content=call.content)), result(call, f"{turn} degrees")]


REAL = [
    *[(name, "qwen3") for name in ("qwen3", "qwen3_instruct_2507", "qwen2_5")],
    *[(name, "llama3") for name in ("llama3_1", "llama3_2")],
]


@pytest.mark.agents
@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
@pytest.mark.parametrize(("name", "family"), REAL)
def test_turns_stay_token_exact_with_the_templates_that_trl_ships(tokenizer, name, family, write):
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    text = Path(folder, "chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
    template = make_template(family, tokenizer, text)
    for spelling in (0, 1):
        test_turns_with_calls_stay_token_exact(family, template, write, spelling)
    test_calls_are_parsed(family, template, "\n")
    assert template.responses.parse("<|im_start|>", template.prompt([user("?")]).text, has_tools=False).content != ""


def test_a_template_that_strips_answers_keeps_their_ids(tokenizer):
    template = make_template("llama3", tokenizer)
    call = sample(template, [user("?")], "\n\nYes ", tools=())
    assert call.content == "\n\nYes "
    history = [user("?"), {"role": "assistant", "content": call.content}, user("!")]
    prompt = template.prompt(history, [call])
    assert prompt.ids[: len(call.context_ids)] == call.context_ids and not prompt.is_retokenized


def test_an_edited_call_is_tokenised_afresh(family, template):
    call = sample(template, [user("Weather?")], CALLS[family][0])
    other = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    result = {"role": "tool", "content": "3", "tool_call_id": "123456789"}
    messages = [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": [other]}, result]
    afresh = template.prompt(messages, tools=TOOLS)._replace(is_retokenized=True)
    assert template.prompt(messages, [call], tools=TOOLS) == afresh


def test_results_spell_no_control_tokens(family, template):
    call = sample(template, [user("Weather?")], CALLS[family][0])

    def controls(text):
        ids = template.prompt([user("Weather?"), told(call), result(call, text)], [call], tools=TOOLS).ids
        assert ids[: len(call.context_ids)] == call.context_ids
        return [token for token in ids if token in template.tokenizer.all_special_ids]

    assert controls("".join(template.tokenizer.all_special_tokens)) == controls("3 degrees")


@pytest.mark.parametrize("content", ["3", " tool: user\n", "größer 😀 <|im_end|>", 'a "b" \\ c'])
def test_results_of_tools_are_found_among_the_tokens(family, template, content):
    """Where no template says otherwise: Llama's writes them as JSON."""
    call = sample(template, [user("?")], CALLS[family][0])
    messages = [*call.messages, told(call), result(call, content)]
    prompt = template.prompt(messages, [call], tools=TOOLS)
    again = sample(template, messages, CALLS[family][1], [call])
    later = template.prompt([*messages, told(again), result(again, "x")], [call, again], tools=TOOLS)

    def found(prompt):
        return template.text([prompt.ids[place] for place in prompt.observations])

    written = json.dumps(content, ensure_ascii=False)[1:-1] if family in ("llama3", "mistral", "ministral") else content
    assert found(prompt).strip() in (written.strip(), content.strip()) and found(prompt)
    assert found(later) == "x" and min(later.observations) >= len(again.context_ids)
    assert template.prompt(messages, tools=TOOLS).observations == ()  # tokenised afresh, no answer comes before it


def test_an_answer_cut_before_its_end_is_ended_by_the_template(family, template):
    call = sample(template, [user("Weather?")], CALLS[family][0], end=False)
    ids = template.prompt([user("Weather?"), told(call), result(call)], [call], tools=TOOLS).ids
    assert ids[: len(call.context_ids) + 1] == (*call.context_ids, template.stop_ids[0])


@pytest.mark.parametrize("echo", [None, "hm", "in the content"])
def test_reasoning_stays_in_the_ids_while_the_template_keeps_it(tokenizer, echo):
    template = make_template("qwen3", tokenizer)
    call = sample(template, [user("Weather?")], "<think>\nhm\n</think>\n\n" + CALLS["qwen3"][0])
    fields = {"hm": {"reasoning_content": "hm"}, "in the content": {"content": "<think>\nhm\n</think>\n"}}
    history = [user("Weather?"), told(call, **fields.get(echo, {})), result(call)]
    second = sample(template, history, "<think>\nso\n</think>\n\n3 degrees", [call])
    assert second.prompt_ids[: len(call.context_ids)] == call.context_ids and second.reply.reasoning_content == "so"
    # The template leaves out the reasoning before the last question.
    history = [*history, {"role": "assistant", "content": "3 degrees"}, user("And Bern?")]
    third = template.prompt(history, [call, second], tools=TOOLS)
    assert third.is_retokenized and third.ids == template.prompt(history, tools=TOOLS).ids


def test_an_assistant_with_a_name_and_an_empty_thought_is_recognised(family, template):
    call = sample(template, [user("Weather?")], CALLS[family][0])
    messages = [user("Weather?"), told(call, name="helper", content="", reasoning_content=""), result(call)]
    assert template.prompt(messages, [call], tools=TOOLS).ids[: len(call.context_ids)] == call.context_ids


def test_control_tokens_that_are_sampled_are_no_content(family, template):
    special = template.tokenizer.all_special_tokens
    kept = {"[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"}
    text = "".join(token for token in special if token not in kept)
    ids = template.tokenizer(text + "yes", add_special_tokens=False)["input_ids"]
    assert template.responses.text(ids) == "yes"


def test_reasoning_of_unknown_families_is_apart(tokenizer):
    template = make_template("hermes", tokenizer, "{{ messages[0].content }}{# drops </think> #}<think>\n")
    assert parse(template, "hm</think>Yes", has_tools=False) == ParsedAnswer("Yes", "hm")
    with pytest.raises(RequestError, match="response_template"):
        parse(template, "x")


@pytest.mark.parametrize("token", ["\n", " "])
def test_space_before_a_call_costs_linear_time(tokenizer, token):
    """Steps, not seconds: a pattern that backtracks would not end here."""
    template = make_template("llama3", tokenizer)
    prompt, deltas = template.prompt([user("?")], tools=TOOLS), []
    streamer = Streamer(
        0,
        deltas.append,
        template.responses.text,
        stops=(),
        template=template.responses.template(has_tools=True),
        prompt_text=prompt.text,
        prefill="",
    )
    ids = template.tokenizer(token * 8, add_special_tokens=False)["input_ids"]
    for _ in range(500):
        streamer.feed(ids, [-1.0] * len(ids))
    assert template.responses.parse(token * 4000, prompt.text, has_tools=True).tool_calls == ()


def test_edited_reasoning_is_tokenised_afresh(tokenizer):
    template = make_template("qwen3", tokenizer)
    call = sample(template, [user("?")], "<think>\nhm\n</think>\n\nYes", tools=())
    history = [user("?"), {"role": "assistant", "content": "Yes", "reasoning_content": "ha"}, user("!")]
    assert template.prompt(history, [call]) == template.prompt(history)._replace(is_retokenized=True)


def test_conversations_with_calls_can_be_learned(family, template):
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "123456789"},
        {"role": "assistant", "content": "3 degrees"},
    ]
    ids, mask = template.conversation(messages, TOOLS)
    learned = template.tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    end = template.tokenizer.eos_token
    called, said, rest = learned.split(end)
    space = " " * (family == "mistral")  # which the template writes before an answer
    assert parse(template, called).tool_calls == (OSLO,) and (said, rest) == (f"{space}3 degrees", "")
    asked = template.prompt(messages[:1], tools=TOOLS).ids
    assert tuple(ids[: len(asked)]) == asked and not any(mask[: len(asked)])


STOPS = ["stop", "}", "\n\n", "aa", "aba", "a\n\na", "o", "```", "</think>", "a</think>", "k>\n", " <", "\n<tool_call>"]
PIECES = [
    *[
        "a",
        "aba",
        "``",
        "```",
        " ",
        "\n",
        "\n\n",
        "é",
        "<",
        "<c",
        "<tool_call",
        "}",
        ";",
        "[TOOL_CALLS]",
        "<think>",
        "</think>",
        "stop",
        "sto",
        "\\",
    ],
    *(call for calls in CALLS.values() for call in calls),
    *('<call:weather>{"city"', "</call>", "<tool_call>", "</tool_call>", '{"name":', "<call:"),
]


def answered(template, text, stops=(), *, sizes=(1,), has_tools=False, include_stop=False):
    """The answer, its deltas and its ids if this text is sampled, so many tokens at a time."""
    responses = template.responses
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    parser = responses.template(has_tools=has_tools)
    text_of = template.answer_text if parser is None else responses.text
    prompt = template.prompt([user("?")], tools=TOOLS if has_tools else ()).text
    thoughts = find_thoughts(parser, prompt)
    finder = StopFinder(text_of, stops, thoughts=thoughts) if stops else lambda ids, checked: None
    expected = (count for count in range(len(ids) + 1) if find_stop(text_of(ids[:count]), stops, thoughts) is not None)
    end, deltas, sent, cut = next(expected, len(ids)), [], 0, None
    streamer = Streamer(
        *(0, deltas.append, text_of),
        **{"stops": stops, "template": parser, "prompt_text": prompt, "prefill": "", "thoughts": thoughts},
    )
    while sent < len(ids) and cut is None:
        size = sizes[sent % len(sizes)]
        cut = finder(ids[: sent + size], sent)
        new = ids[sent : min(sent + size, len(ids) if cut is None else cut)]
        streamer.feed(new, [-1.0] * len(new))
        sent += len(new)
    assert sent == end
    text = text_of(ids[:sent])
    start, stop = find_stop(text, stops, thoughts) or (len(text), "")
    answer = responses.parse(text[: start + len(stop) * include_stop], prompt, has_tools=has_tools)
    streamer.finish(answer)
    return answer, deltas, ids[:sent]


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from([*FAMILIES, "qwen3_5"]),
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    has_tools=st.booleans(),
    stops=st.lists(st.sampled_from(STOPS), max_size=2, unique=True),
    include_stop=st.booleans(),
)
def test_deltas_join_to_the_answer(tokenizer, family, pieces, sizes, has_tools, stops, include_stop):
    """Deltas never change later, for any sampled text, stop strings and any number of tokens at a time."""
    options = {"sizes": sizes, "has_tools": has_tools, "include_stop": include_stop}
    answer, deltas, ids = answered(made_before(family, tokenizer), "".join(pieces), stops, **options)
    assert "".join(delta.content for delta in deltas) == answer.content
    assert "".join(delta.reasoning_content for delta in deltas) == (answer.reasoning_content or "")
    assert [token for delta in deltas for token in delta.token_ids] == ids


@pytest.mark.parametrize(
    ("stop", "content", "reasoning"),
    [
        ("\n\n", "Yes.", "a.\n\nb"),
        (".", "Yes", "a.\n\nb"),
        ("b", "Yes.\n\nNo", "a.\n\nb"),
        ("</think>", "", "a.\n\nb"),
        ("b\n</", "Yes.\n\nNo", "a.\n\nb"),
        ("b\n</think>", "", "a."),
        ("\n</think>\n\nY", "", "a.\n\nb"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_stop_string_ends_the_content_and_no_thought(tokenizer, family, stop, content, reasoning):
    text = "<think>\n" * (family == "qwen3") + "a.\n\nb\n</think>\n\nYes.\n\nNo"
    for sizes in ((1,), (7, 30)):
        answer, deltas, _ = answered(make_template(family, tokenizer), text, (stop,), sizes=sizes)
        assert answer == ParsedAnswer(content, reasoning)
        assert "".join(delta.content for delta in deltas) == content
        assert "".join(delta.reasoning_content for delta in deltas) == reasoning


@pytest.mark.parametrize("text", ["so\n\n" * 1000, "</think>" + "\n" * 4000])
def test_the_work_of_looking_for_stop_strings_beside_content_grows_linearly(tokenizer, text):
    template, decoded = make_template("qwen3_5", tokenizer), 0

    def text_of(token_ids):
        nonlocal decoded
        decoded += len(token_ids)
        return template.responses.text(token_ids)

    prompt = template.prompt([user("?")]).text
    finder = StopFinder(text_of, ["\n\n"], thoughts=find_thoughts(template.responses.template(has_tools=False), prompt))
    ids = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert not any(finder(ids[: count + 8], count) for count in range(0, len(ids), 8)) and decoded < 16 * len(ids)

"""Fields of requests of OpenAI's Responses API: of the request itself, of its items, of their parts, and of tools."""

from collections.abc import Sequence
from typing import Any

from jaxft.rollout.messages import MAX_TOOLS
from jaxft.serving.fields import AT_LEAST_0, NAME, Field, any_of, list_of, object_schema

TEXT = {"type": "string"}
ITEM_ID = Field("id", "OpenAI", "ignored", "Items are not stored.")
STATUS = Field("status", "OpenAI", "ignored", "An item that is sent back is complete.")
NAMESPACE = Field("namespace", "OpenAI", "refused", "tools have no namespaces")
CALLER = Field("caller", "OpenAI", "refused", "only the model itself calls tools", unused=({"type": "direct"},))


def _type(name: str, *, required: bool = True) -> Field:
    return Field("type", "OpenAI", "taken", f"`{name}`.", "text", required=required, schema={"const": name})


PARTS = {
    "input_text": (
        _type("input_text"),
        Field("text", "OpenAI", "taken", "The text.", "text", required=True),
        Field("prompt_cache_breakpoint", "OpenAI", "ignored", "The prefix cache needs no marks."),
    ),
    "output_text": (
        _type("output_text"),
        Field("text", "OpenAI", "taken", "The text.", "text", required=True),
        Field("annotations", "OpenAI", "ignored", "OpenAI's own tools make them; the model does not read them."),
        Field("logprobs", "OpenAI", "ignored", "The run has recorded them."),
        Field("parsed", "OpenAI", "ignored", "The client reads it from the text."),
    ),
    "refusal": (_type("refusal"), Field("refusal", "OpenAI", "taken", "The text.", "text", required=True)),
    "summary_text": (_type("summary_text"), Field("text", "OpenAI", "taken", "The text.", "text", required=True)),
    "reasoning_text": (_type("reasoning_text"), Field("text", "OpenAI", "taken", "The text.", "text", required=True)),
}
"""Fields of the parts of items, by their type."""

SAID, GIVEN = ("input_text", "output_text", "refusal"), ("input_text",)


def _list_of_parts(kinds: Sequence[str]) -> dict[str, Any]:
    return list_of(any_of(*(object_schema(PARTS[kind]) for kind in kinds)))


ROLES = ("user", "assistant", "system", "developer")

ITEMS = {
    "message": (
        _type("message", required=False),
        Field(
            "role",
            "OpenAI",
            "taken",
            f"One of {', '.join(ROLES)}.",
            "text",
            required=True,
            schema={"enum": list(ROLES)},
        ),
        Field(
            "content",
            "OpenAI",
            "taken",
            "Text, or parts of text.",
            "text or list of objects",
            required=True,
            schema=any_of(TEXT, _list_of_parts(SAID)),
        ),
        ITEM_ID,
        STATUS,
        Field("phase", "OpenAI", "ignored", "Chat templates have no phases."),
    ),
    "reasoning": (
        _type("reasoning"),
        Field(
            "content",
            "OpenAI",
            "taken",
            "Reasoning before an answer, in parts of `reasoning_text`.",
            "list of objects",
            schema=_list_of_parts(("reasoning_text",)),
        ),
        Field(
            "summary",
            "OpenAI",
            "taken",
            "Parts of `summary_text`, which are read if there is no content.",
            "list of objects",
            schema=_list_of_parts(("summary_text",)),
        ),
        ITEM_ID,
        STATUS,
        Field("encrypted_content", "OpenAI", "ignored", "Only OpenAI can read it."),
    ),
    "function_call": (
        _type("function_call"),
        Field("call_id", "OpenAI", "taken", "Name of the call, which its output refers to.", "text", required=True),
        Field("name", "OpenAI", "taken", "Name of the function.", "text", required=True, schema=NAME),
        Field("arguments", "OpenAI", "taken", "A JSON object, as text.", "text", required=True),
        Field("parsed_arguments", "OpenAI", "ignored", "The client reads it from the arguments."),
        ITEM_ID,
        STATUS,
        CALLER,
        NAMESPACE,
    ),
    "function_call_output": (
        _type("function_call_output"),
        Field("call_id", "OpenAI", "taken", "The `call_id` of the call.", "text", required=True),
        Field(
            "output",
            "OpenAI",
            "taken",
            "Text, or parts of `input_text`.",
            "text or list of objects",
            required=True,
            schema=any_of(TEXT, _list_of_parts(GIVEN)),
        ),
        ITEM_ID,
        STATUS,
        Field("name", "OpenAI", "ignored", "The call names the function."),
        CALLER,
        NAMESPACE,
    ),
}
"""Fields of the items of an input, by their type."""

TOOL = (
    _type("function"),
    Field("name", "OpenAI", "taken", "Name of the function.", "text", required=True, schema=NAME),
    Field("description", "OpenAI", "taken", "Purpose of the function.", "text"),
    Field("parameters", "OpenAI", "taken", "JSON schema of the arguments.", "object"),
    Field("strict", "OpenAI", "ignored", "Arguments are a JSON object; sampling is not constrained further."),
    Field("defer_loading", "OpenAI", "refused", "every tool is in the prompt", unused=(False,)),
    Field("allowed_callers", "OpenAI", "refused", "only the model itself calls tools", unused=([], ["direct"])),
    Field("output_schema", "OpenAI", "refused", "put it into the description"),
)

TOOL_CHOICE = (
    _type("function"),
    Field("name", "OpenAI", "taken", "The function that the answer must call.", "text", required=True),
)

FIELDS = (
    Field("model", "OpenAI", "taken", "Name of the language model in the configuration.", "text", required=True),
    Field(
        "input",
        "OpenAI",
        "taken",
        "Text of the user, or the whole conversation as items of text, reasoning, calls and their outputs.",
        "text or list of objects",
        required=True,
        schema=any_of(TEXT, list_of(any_of(*map(object_schema, ITEMS.values())), minItems=1)),
    ),
    Field("instructions", "OpenAI", "taken", "Text of the system: the first message.", "text"),
    Field(
        "tools",
        "OpenAI",
        "taken",
        "Functions that the model may call.",
        "list of objects",
        schema=list_of(object_schema(TOOL), maxItems=MAX_TOOLS),
    ),
    Field(
        "tool_choice",
        "OpenAI",
        "taken",
        "`auto`, `none`, `required` or a function.",
        "text or object",
        schema=any_of({"enum": ["auto", "none", "required"]}, object_schema(TOOL_CHOICE)),
    ),
    Field("parallel_tool_calls", "OpenAI", "taken", "False: the first call of an answer counts.", "boolean"),
    Field("max_output_tokens", "OpenAI", "taken", "Limit of sampled tokens.", "integer"),
    Field("temperature", "OpenAI", "taken", "An episode may set its own, as evaluations do.", "number"),
    Field("top_p", "OpenAI", "taken", "Nucleus sampling.", "number"),
    Field("stream", "OpenAI", "taken", "Server-sent events; tool calls come whole, at the end.", "boolean"),
    Field("stream_options", "OpenAI", "ignored", "Pads events against those who listen to a network."),
    Field("store", "OpenAI", "ignored", "Nothing is stored; the run records every call."),
    Field("metadata", "OpenAI", "ignored", "Labels of stored responses; the run records every call."),
    Field("user", "OpenAI", "ignored", "Names the end user, for OpenAI's monitoring."),
    Field("safety_identifier", "OpenAI", "ignored", "Names the end user, for OpenAI's monitoring."),
    Field("access_programs", "OpenAI", "ignored", "They are about OpenAI's own models."),
    Field("prompt_cache_key", "OpenAI", "ignored", "The prefix cache needs no key and changes no answer."),
    Field("prompt_cache_options", "OpenAI", "ignored", "The prefix cache needs no options and changes no answer."),
    Field("prompt_cache_retention", "OpenAI", "ignored", "The prefix cache lives until the next update."),
    Field("service_tier", "OpenAI", "ignored", "There is one tier."),
    Field("max_tool_calls", "OpenAI", "ignored", "It limits OpenAI's own tools, which do not run here."),
    Field("previous_response_id", "OpenAI", "refused", "responses are not stored: send the whole input"),
    Field("conversation", "OpenAI", "refused", "conversations are not stored: send the whole input"),
    Field("prompt", "OpenAI", "refused", "prompts are not stored: send instructions and input"),
    Field("background", "OpenAI", "refused", "responses are not stored: wait for the answer", unused=(False,)),
    Field("background_options", "OpenAI", "refused", "responses are not stored: wait for the answer"),
    Field("context_management", "OpenAI", "refused", "send the conversation as it shall be read", unused=([],)),
    Field(
        "truncation",
        "OpenAI",
        "refused",
        "set llms.<name>.long_prompts in the configuration",
        unused=("disabled",),
    ),
    Field(
        "include",
        "OpenAI",
        "refused",
        "reasoning is in the items as text; log-probabilities come with chat completions",
        unused=([], ["reasoning.encrypted_content"]),
    ),
    Field("top_logprobs", "OpenAI", "refused", "log-probabilities come with chat completions", unused=(0,)),
    Field(
        "text",
        "OpenAI",
        "refused",
        "sampling is not constrained: ask for the format in the prompt, or give a tool with tool_choice",
        unused=({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    ),
    Field(
        "reasoning",
        "OpenAI",
        "refused",
        "give the chat template its own variable, as in chat_template_kwargs={'enable_thinking': false}",
        unused=({},),
    ),
    Field("image", "OpenAI", "refused", "the policy reads text only"),
    Field("moderation", "OpenAI", "refused", "nothing is moderated here"),
    Field("stop", "vLLM", "taken", "Strings that end the answer, any number of them.", "text or list of texts"),
    Field("seed", "vLLM", "taken", "Varies the random numbers, which an episode fixes anyway.", "seed"),
    Field(
        "top_k",
        "vLLM",
        "taken",
        "Number of most likely tokens to draw from; 0 for all.",
        "integer",
        schema=AT_LEAST_0,
    ),
    Field("chat_template_kwargs", "vLLM", "taken", "Variables of the chat template.", "object"),
)
"""Every field of a request of responses."""

OBJECTS = {**ITEMS, **PARTS, "tool": TOOL, "tool_choice": TOOL_CHOICE}
"""Fields of all objects in a request."""

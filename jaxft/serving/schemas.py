"""Common parts of all dialects' requests: base class, types of their fields, and refusals that name the field.

A model says of every field whether it is taken, refused or ignored, and a field that is in no model is refused. So no
field is without effect unless the model says why that does no harm. Attributes have the names of `ChatRequest`'s
arguments; where the API has another name, it is the alias.
"""

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema
from pydantic_core.core_schema import ValidationInfo, ValidatorFunctionWrapHandler

from jaxft import ChatRequest, CompletionRequest, Reply
from jaxft.core import LARGEST_FLOAT32
from jaxft.errors import RequestError
from jaxft.rollout import MAX_CHOICES, MAX_TOOLS, TOOL_NAME
from jaxft.serving.wire import APIError, EventWriter, openai_error

MAX_INTEGER = 2**31 - 1
"""Largest integer of a field; arrays on the device hold no larger one."""

MAX_FAULTS = 5
"""Most faults of a request that its refusal describes."""

MAX_STOPS = 1024
"""Most stop strings: each token sampled is searched for all of them."""

WAY_OUT = "the policy reads text only, and tools are functions of the agent's"
"""Advice in the refusal of an object of another type."""

VARIABLES = "give the chat template its own variable, as in chat_template_kwargs={'enable_thinking': false}"
"""Advice in the refusal of a setting of reasoning."""

Item = TypeVar("Item")


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


AS_SENT = WrapValidator(_as_sent)
"""Annotation of a value that is checked and stays what was sent: an integer no float, an object with its own order."""

Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list; its first wrong item is refused."""

TextOr = Annotated[
    Annotated[str, Tag("text")] | Annotated[Item, Tag("text or")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "text or"),
]
"""Text, or a value of another type."""

Penalty = Annotated[float, Field(ge=-2, le=2), AS_SENT]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Seed = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Stops = Annotated[Many[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]
Tools = Annotated[Many[Item], Field(max_length=MAX_TOOLS)]
Name = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]


class Refused:
    """Annotation of a field that is refused unless its value is null or one of those that ask for nothing.

    Attributes:
        note: advice for the place of the field.
        unused: values that ask for nothing.
    """

    def __init__(self, note: str, *unused: Any) -> None:
        self.note = note
        self.unused = unused

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema by which pydantic checks a value."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the field."""
        return {"enum": [*self.unused, None], "description": self.note}

    def _check(self, value: Any) -> None:
        # True equals 1, but is another value.
        if not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in (None, *self.unused)
        ):
            raise PydanticCustomError("unsupported_parameter", self.note)


Caller = Annotated[Any, Refused("only the model itself calls tools", {"type": "direct"})]
AllowedCallers = Annotated[Any, Refused("only the model itself calls tools", [], ["direct"])]


def needs(flag: str) -> AfterValidator:
    """Return the annotation of a value that asks for nothing, or needs the field `flag` before it to be true."""

    def check(value: Any, info: ValidationInfo) -> Any:
        asks = not isinstance(value, BaseModel) or bool(value.model_fields_set)
        if asks and not info.data.get(flag):
            raise PydanticCustomError("impossible", f"it needs {flag} to be true")
        return value

    return AfterValidator(check)


def function_tool(
    name: str, description: str | None = None, parameters: Any = None, strict: bool | None = None
) -> dict[str, Any]:
    """Return a function in the format of chat completions, or with its name alone, the choice to call it."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict or None}
    return {"type": "function", "function": {name: each for name, each in given.items() if each is not None}}


class RequestObject(BaseModel):
    """An object in a request. Unknown fields are refused, and no value is turned into one of another type.

    Attributes:
        ignored: fields without effect, which does no harm; docs/openai-api.md and docs/dialects.md say why.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        values = {name: value for name, value in values.items() if name not in cls.ignored}
        if len(values) > len(cls.model_fields) + MAX_FAULTS:  # pydantic would make a fault of each
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in [name for name in values if name not in known][MAX_FAULTS + 1 :]:
                del values[name]
        return values


class AnswerFormat(RequestObject):
    """Format of an answer in responses and messages."""

    format: dict[str, Any] | None = Field(None, description="`text`; `json_object`; or `json_schema` with a schema.")

    def as_chat(self) -> dict[str, Any] | None:
        """Return it as chat completions have it: the schema in an object of its own."""
        is_schema = self.format is not None and self.format.get("type") == "json_schema"
        return {"type": "json_schema", "json_schema": self.format} if is_schema else self.format


class APIRequest(RequestObject):
    """A request for answers in any dialect."""

    model: str = Field(description="Name of the language model in the configuration.")
    temperature: Annotated[float, Field(ge=0, le=LARGEST_FLOAT32), AS_SENT] | None = Field(
        None, description="An episode may set its own, as evaluations do."
    )
    top_p: Annotated[float, Field(gt=0, le=1), AS_SENT] | None = Field(None, description="Nucleus sampling.")
    guided_regex: str | None = Field(None, description="Regular expression that the whole answer matches.")
    guided_grammar: str | None = Field(None, description="Grammar of the whole answer, in the notation of Lark.")
    stream: bool | None = Field(
        None, description="Server-sent events; tool calls and token ids come whole, at the end."
    )

    def to_request(self) -> ChatRequest | CompletionRequest:
        """Return what to sample.

        Raises:
            RequestError: a field has a value that is impossible beside the others.
        """
        raise NotImplementedError

    def arguments(self, request_type: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
        """Return the arguments of a `ChatRequest` or `CompletionRequest` that are given and not null."""
        names = self.model_fields_set & request_type.__dataclass_fields__.keys()
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Dialect(NamedTuple):
    """An API to ask for answers by.

    Attributes:
        path: path of its requests.
        request: model of its requests.
        reply: returns the JSON of a reply to a request; the function gives the text of a token id.
        make_writer: returns the writer of a streamed reply, from the same arguments without the reply.
        error: returns status and JSON of an error.
    """

    path: str
    request: type[APIRequest]
    reply: Callable[[Any, Reply, Callable[[int], str]], dict[str, Any]]
    make_writer: Callable[[Any, Callable[[int], str]], EventWriter]
    error: Callable[[APIError], tuple[int, dict[str, Any]]] = openai_error


def _read_logit_bias(given: dict[str, Any]) -> dict[int, float]:
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise PydanticCustomError("impossible", f"the key {short(key)} is no token id")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PydanticCustomError("float_type", f"the value of the key {key} is no number")
    return {int(key): value for key, value in given.items()}


class StreamOptions(RequestObject):
    """OpenAI's `stream_options`."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="The last chunk has the counts of tokens.")


class OpenAIRequest(APIRequest):
    """A request in any dialect of OpenAI's."""

    ignored = frozenset({"user"})

    seed: Seed | None = Field(None, description="Varies the random numbers, which an episode fixes anyway.")
    stop: TextOr[Stops] | None = Field(None, description="At most 1,024 strings that end the answer.")


class ChatFields(OpenAIRequest):
    """Fields that chat completions and responses share."""

    ignored = OpenAIRequest.ignored | {
        *("metadata", "store", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }

    parallel_tool_calls: bool | None = Field(None, description="False: the first call of an answer counts.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    moderation: Annotated[Any, Refused("nothing is moderated here")] = None


class CompletionFields(OpenAIRequest):
    """Fields that chat completions and completions share, those of OpenAI and those of vLLM."""

    ignored = OpenAIRequest.ignored | {"request_id", "priority", "cache_salt"}

    max_tokens: Count | None = Field(None, description="Limit of sampled tokens; without it, the room in the context.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Number of choices.")
    logit_bias: Annotated[dict[str, Any], AfterValidator(_read_logit_bias)] | None = Field(
        None, description="Numbers added to the logits of token ids."
    )
    stream_options: Annotated[StreamOptions, needs("stream")] | None = Field(
        None, description="`include_usage`; `include_obfuscation` is ignored."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Subtracted from a token's logit for each time that the answer has it."
    )
    presence_penalty: Penalty | None = Field(
        None, description="Subtracted from the logits of tokens that the answer has."
    )
    response_format: dict[str, Any] | None = Field(
        None, description="`text`; `json_object`; or `json_schema` with a schema, which the answer then satisfies."
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER), AfterValidator(lambda value: max(value, 0))] | None = Field(
        None, description="Number of most likely tokens to draw from; 0 or -1 for all."
    )
    min_p: Annotated[float, Field(ge=0, lt=1), AS_SENT] | None = Field(
        None, description="Least probability relative to that of the most likely token."
    )
    stop_token_ids: Many[Natural] | None = Field(None, description="Token ids that end the answer, too.")
    include_stop: bool | None = Field(
        None, alias="include_stop_str_in_output", description="The text ends with the stop string."
    )
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6), AS_SENT] | None = Field(
        None, description="Divides positive and multiplies negative logits of tokens of prompt and answer."
    )
    ignore_eos: bool | None = Field(None, description="The model's own end tokens do not end the answer.")
    min_tokens: Natural | None = Field(None, description="Tokens sampled before a token may end the answer.")
    skip_special_tokens: Annotated[Any, Refused("text never has control tokens, token ids do", True)] = None
    spaces_between_special_tokens: Annotated[Any, Refused("text never has control tokens, token ids do", True)] = None

    @property
    def include_usage(self) -> bool:
        """True if the events of a stream end with the counts of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


Request = TypeVar("Request", bound=APIRequest)


def read_request(model: type[Request], body: Mapping[str, Any]) -> Request:
    """Return the request that a JSON object holds.

    Raises:
        APIError: fields are missing, unknown, refused, of another type or out of their range; five of them are named.

    >>> read_request(CompletionFields, {"model": "policy", "n": 2, "echo": None})
    Traceback (most recent call last):
    jaxft.serving.wire.APIError: echo is no known parameter: leave it out
    >>> read_request(CompletionFields, {"model": "policy", "n": 0, "skip_special_tokens": False})
    Traceback (most recent call last):
    jaxft.serving.wire.APIError: n is 0; wanted greater than or equal to 1
    skip_special_tokens is false: text never has control tokens, token ids do
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    told = [_describe(fault, body, model) for fault in faults[:MAX_FAULTS]]
    more = [f"there are at least {len(faults) - MAX_FAULTS} more faults"] if len(faults) > MAX_FAULTS else []
    kind, (_, param) = faults[0]["type"], told[0]
    codes = {"extra_forbidden": "unknown_parameter", "unsupported_parameter": "unsupported_parameter"}
    code = "invalid_type" if kind.endswith("_type") else codes.get(kind)
    raise APIError("\n".join([*(sentence for sentence, _ in told), *more]), param=param, code=code)


def as_refusal(model: type[APIRequest], error: RequestError, code: str | None = None) -> APIError:
    """Return the refusal of a request that cannot be answered, with the API's own name of the argument.

    >>> error = RequestError("include_stop is 0; wanted a boolean", param="include_stop")
    >>> as_refusal(CompletionFields, error).message
    'include_stop_str_in_output is 0; wanted a boolean'
    """
    message, param = str(error), error.param
    field = model.model_fields.get(param or "")
    if param is not None and field is not None and field.alias is not None:
        message = field.alias + message.removeprefix(param) if message.startswith(f"{param} ") else message
        param = field.alias
    return APIError(message, param=param, code=code)


def _describe(fault: ErrorDetails, body: Mapping[str, Any], model: type[APIRequest]) -> tuple[str, str]:
    """Return a fault in a sentence, and the path of the field that it is in."""
    kind, value, wanted = fault["type"], fault["input"], fault["msg"]
    path = _path(fault, body)
    if kind == "extra_forbidden":
        known = [field.alias or name for name, field in model.model_fields.items()]
        near = get_close_matches(path, known, n=1)
        return f"{path} is no known parameter: " + (f"did you mean {near[0]!r}?" if near else "leave it out"), path
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        context = fault.get("ctx", {})
        name = context["discriminator"].strip("'")
        path, value = f"{path}.{name}", value.get(name)
        wanted = f"Input should be {context.get('expected_tags', 'text')}"
    if kind == "missing" or (kind == "union_tag_not_found" and value is None):
        return f"{path} is missing", path
    wanted = wanted.replace("Input should be ", "; wanted " + "text or " * (fault["loc"][-1:] == ("text or",)))
    wanted = wanted if wanted.startswith(";") else f": {wanted}"
    way_out = f": {WAY_OUT}" if path.endswith("].type") else ""
    return f"{path} is {short(value)}{wanted}{way_out}", path.rpartition("[")[0] if path.endswith("]") else path


def _path(fault: ErrorDetails, body: Mapping[str, Any]) -> str:
    """Return the path to the field of a fault, such as `messages[0].role`; a very long name is cut.

    pydantic's own location names, beside fields and indices, the members of unions, which are left out.
    """
    path, location = "", fault["loc"]
    value: Any = body
    for depth, part in enumerate(location):
        if isinstance(part, int):
            path, value = f"{path}[{part}]", value[part]
            continue
        is_member = (
            depth > 0 and isinstance(location[depth - 1], int) and part in (value.get("type"), value.get("role"))
        )
        is_field = isinstance(value, dict) and part in value and not is_member
        is_absent = fault["type"] in ("missing", "impossible") and depth == len(location) - 1
        if is_field or is_absent:
            path = f"{path}.{part[:100]}" if path else part[:100]
            value = value.get(part)
    return path


def short(value: Any) -> str:
    """Return a value as JSON for a message, cut after 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."

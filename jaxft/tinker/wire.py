"""Bodies of Tinker's requests and answers: Protocol Buffers where its client sends them, JSON elsewhere.

The client sends the data of a forward pass as a `ForwardBackwardRequest`, and reads logprobs and samples from a
`ForwardBackwardOutput` and a `SampleResponse`. `MESSAGES` has what is read and written of their fields; others are
skipped, as in every reader of Protocol Buffers.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from jaxft.tinker.data import Datum, Output, Samples

PROTOBUF = "application/x-protobuf"

MESSAGES: Mapping[str, str] = {
    "ForwardBackwardRequest": "1 model_id text, 2 seq_id int, 3 data Datum*, 4 loss_fn text, 6 forward_only int, "
    "7 loss_fn_config_v2 ValueEntry*",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs TensorEntry*",
    "Chunk": "1 encoded_text Tokens",
    "Tokens": "1 tokens bytes",
    "TensorEntry": "1 key text, 2 value Tensor",
    "Tensor": "1 dense bytes, 3 dtype int, 4 shape int*",
    "Entry": "1 key text, 2 value double",
    "ValueEntry": "1 key text, 2 value Value",
    "Value": "1 number double, 2 text text",
    "ForwardBackwardOutput": "1 loss_fn_output_type text, 2 loss_fn_outputs ArrayRecord*, 3 metrics Entry*",
    "ArrayRecord": "2 fields BatchedEntry*, 3 num_datums int",
    "BatchedEntry": "1 key text, 2 value BatchedTensor",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int",
    "SampleResponse": "1 sequences Sequence*, 2 prompt_logprobs bytes",
    "Sequence": "1 stop_reason int, 2 tokens bytes, 3 logprobs bytes",
}
"""Numbers, names and types of the fields of each message; `*` marks repeated ones."""

SCALARS = {"double": 1, "int": 3, "text": 9, "bytes": 12}
"""Numbers of Protocol Buffers' types; an `int` reads every integer, bool and enum."""


DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Numbers of dtypes."""


def _make_messages() -> dict[str, Any]:
    """Return the classes of the messages."""
    file = FileDescriptorProto(name="jaxft/tinker.proto", package="jaxft.tinker", syntax="proto3")
    for name, text in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (each.split() for each in text.split(", ")):
            label, plain = (3 if kind.endswith("*") else 1), kind.removesuffix("*")
            about = (
                {"type": SCALARS[plain]} if plain in SCALARS else {"type": 11, "type_name": f".jaxft.tinker.{plain}"}
            )
            message.field.add(name=field, number=int(number), label=label, **about)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"jaxft.tinker.{name}")) for name in MESSAGES}


CLASSES = _make_messages()
"""Classes of the messages, by name."""


def read_forward_backward(body: bytes) -> dict[str, Any]:
    """Return the arguments of `Service.forward_backward` in a body, and `seq_id`.

    Raises:
        ValueError: the body is no such message, or holds images, sound, or arrays that are not dense.
    """
    try:
        found = CLASSES["ForwardBackwardRequest"].FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no ForwardBackwardRequest of Protocol Buffers: {error}") from None
    return {
        "model_id": found.model_id,
        "seq_id": found.seq_id,
        "data": [_datum(f"data[{number}]", each) for number, each in enumerate(found.data)],
        "loss_fn": found.loss_fn,
        "loss_fn_config": {each.key: each.value.text or each.value.number for each in found.loss_fn_config_v2},
        "forward_only": bool(found.forward_only),
    }


def _datum(place: str, found: Any) -> Datum:
    inputs = {}
    for each in found.loss_fn_inputs:
        name, tensor = f"{place}.loss_fn_inputs.{each.key:.50}", each.value
        flat, shape = _array(name, tensor.dense, tensor.dtype), tuple(tensor.shape)
        if min(shape, default=1) < 0 or math.prod(shape) != flat.size:
            raise ValueError(f"{name} has {flat.size} numbers, not sparse ones, and shape {list(shape)}")
        inputs[each.key] = flat.reshape(shape)
    place += ".model_input"
    if not all(chunk.HasField("encoded_text") for chunk in found.model_input):
        raise ValueError(f"{place} holds images or sound; served are tokens")
    tokens = [_array(place, chunk.encoded_text.tokens, 3) for chunk in found.model_input]
    return Datum(model_input=np.concatenate([np.zeros(0, np.int32), *tokens]), loss_fn_inputs=inputs)


def _array(place: str, data: bytes, dtype: int) -> np.ndarray:
    if dtype not in DTYPES or len(data) % DTYPES[dtype].itemsize:
        raise ValueError(f"{place} has {len(data)} bytes of dtype {dtype}; wanted float32 (1) or int64 (2)")
    return np.frombuffer(data, DTYPES[dtype])


def write_forward_backward(output: Output) -> bytes:
    """Return the result of `Service.forward_backward` as a `ForwardBackwardOutput`."""
    arrays = [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]
    offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype("<i8").tobytes()
    field = {"key": "logprobs", "value": {"data": b"".join(map(bytes, arrays)), "offsets": offsets, "dtype": 1}}
    message = CLASSES["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"fields": [field], "num_datums": len(arrays)}],
        metrics=[{"key": name, "value": value} for name, value in output.metrics.items()],
    )
    return bytes(message.SerializeToString())


def write_sample(samples: Samples) -> bytes:
    """Return the result of `Service.sample` as a `SampleResponse`; NaN stands for None."""
    sequences = [
        {
            "stop_reason": int(each.stop_reason != "stop"),
            "tokens": np.array(each.tokens, "<i4").tobytes(),
            "logprobs": np.array(each.logprobs, "<f4").tobytes(),
        }
        for each in samples.sequences
    ]
    prompt = np.array(samples.prompt_logprobs or (), "<f4").tobytes() or None
    return bytes(CLASSES["SampleResponse"](sequences=sequences, prompt_logprobs=prompt).SerializeToString())

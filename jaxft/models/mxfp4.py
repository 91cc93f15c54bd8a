"""Weights in MXFP4, as gpt-oss is published: numbers of four bits, and a power of two for every 32 of them.

A tensor `X [E in out]` is stored as `X_blocks [E out in/32 16]`, two numbers a byte, the lower four bits first, and
`X_scales [E out in/32]`, exponents plus 127 (OCP Microscaling Formats 1.0, sections 5.3 and 5.4).
"""

from functools import partial

import numpy as np

from jaxft.errors import ModelFileError
from jaxft.models.hf_files import StoredTensor, read_bytes

POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = np.array([*POSITIVE, *(-number for number in POSITIVE)], np.float32)
"""Numbers by their four bits."""

BLOCKS, SCALES, METHOD = "_blocks", "_scales", "mxfp4"
"""Endings of the names of the two tensors, and the `quant_method` of such files."""


def dequantised(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with those in MXFP4 as plain ones, which are computed when they are read.

    Raises:
        ModelFileError: blocks have no scales that fit them.
    """
    found = {}
    for name, tensor in stored.items():
        base = name.removesuffix(BLOCKS)
        if base == name:
            if name.removesuffix(SCALES) + BLOCKS not in stored:
                found[name] = tensor
            continue
        scales, shape = stored.get(base + SCALES), tensor.shape
        fits = scales is not None and scales.dtype == tensor.dtype == "U8" and scales.shape == shape[:-1]
        if scales is None or not fits or len(shape) != 4 or shape[-1] != 16:
            held = "absent" if scales is None else f"{scales.dtype}{list(scales.shape)}"
            raise ModelFileError(
                f"{tensor.file}: tensor {name!r} is {tensor.dtype}{list(shape)} and its scales are {held}; wanted U8 "
                "[E out in/32 16] and [E out in/32]: take the files of the model again, or unquantised ones"
            )
        plain = shape[0], 32 * shape[2], shape[1]
        found[base] = StoredTensor(tensor.file, "F32", plain, 0, partial(dequantise, tensor, scales))
    return found


def dequantise(blocks: StoredTensor, scales: StoredTensor) -> np.ndarray:
    """Return the values `[E in out]` of a tensor; each is a number of bfloat16, too."""
    packed = read_bytes(blocks)  # [E out in/32 16]
    numbers = NUMBERS[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:-1], 32)
    values = np.ldexp(numbers, read_bytes(scales).astype(np.int32)[..., None] - 127)
    return values.reshape(*values.shape[:2], -1).swapaxes(1, 2)

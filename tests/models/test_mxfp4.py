"""Weights in MXFP4 against numbers worked out by hand, and files that do not hold them whole."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxft.errors import ModelFileError
from jaxft.models.hf_files import read_tensor, stored_tensors
from jaxft.models.mxfp4 import dequantised


def blocks():
    """One expert with two outputs and 32 inputs, of which the first three numbers are not zero."""
    packed = np.zeros((1, 2, 1, 16), np.uint8)
    packed[0, 0, 0, :2] = 0x21, 0x0F  # 0.5, 1.0; -6.0, 0.0
    packed[0, 1, 0, :2] = 0x9A, 0x07  # -1.0, -0.5; 6.0, 0.0
    return packed


def test_numbers_of_four_bits_times_a_power_of_two(tmp_path):
    scales = np.array([[[128], [125]]], np.uint8)  # 2 and 1/4
    tensors = {"w_blocks": blocks(), "w_scales": scales, "norm.weight": np.ones(3, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = dequantised(stored_tensors(tmp_path))
    assert {name: tensor.shape for name, tensor in stored.items()} == {"w": (1, 32, 2), "norm.weight": (3,)}
    values = read_tensor(stored["w"])
    np.testing.assert_array_equal(values[0, :4].T, [[1.0, 2.0, -12.0, 0.0], [-0.25, -0.125, 1.5, 0.0]])
    assert not values[0, 4:].any()


@pytest.mark.parametrize(
    ("scales", "held"),
    [(None, "absent"), (np.zeros((1, 2, 2), np.uint8), r"U8\[1, 2, 2\]"), (np.zeros((1, 2, 1)), "F64")],
)
def test_blocks_without_scales_that_fit(scales, held, tmp_path):
    save_file(
        {"w_blocks": blocks()} | ({} if scales is None else {"w_scales": scales}), Path(tmp_path, "model.safetensors")
    )
    with pytest.raises(ModelFileError, match=rf"'w_blocks' is U8\[1, 2, 1, 16\] and its scales are {held}"):
        dequantised(stored_tensors(tmp_path))

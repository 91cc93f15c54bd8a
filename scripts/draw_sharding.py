"""Draw docs/scaling/sharding.png: the part of each array that each device of a 2 x 2 x 2 mesh holds.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/draw_sharding.py
"""

from pathlib import Path

import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import jaxft
from jaxft.core.sharding import AXES, ROW_AXES

ARRAYS = (
    ("q, k, v, gate, up: kernel", "layers/self_attn/q_proj/kernel", ("hidden", "heads or width")),
    ("o, down: kernel", "layers/self_attn/o_proj/kernel", ("heads or width", "hidden")),
    ("embedding, lm_head", "embed", ("vocabulary", "hidden")),
    ("norms, adapters", "layers/input_layernorm/scale", ("layers", "hidden")),
)
CUTS = (
    ("batch, activations", (ROW_AXES,), ("rows", "tokens")),
    ("keys and values", (ROW_AXES, "tensor"), ("rows", "heads")),
    ("logits in training", (AXES,), ("tokens", "vocabulary")),
    ("logits in decoding", (AXES,), ("rows", "vocabulary")),
)
SIZE = 8


def main() -> None:
    """Draw three rows of boxes: parameters as stored, parameters as used, and activations, caches and logits."""
    mesh = jaxft.make_mesh(2, 2, 2)
    sharding = jaxft.sharding_for(jaxft.model_preset("qwen3-1m", vocab_size=264), mesh)
    figure = Figure(figsize=(12, 9.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    boxes = figure.subplots(3, 4)
    for column, (name, path, sides) in enumerate(ARRAYS):
        draw(boxes[0, column], f"{name}\nstored", sharding.leaf_sharding(path, (SIZE, SIZE)), sides)
        draw(
            boxes[1, column],
            f"{name}\nused, and sampled with",
            sharding.gathered().leaf_sharding(path, (SIZE, SIZE)),
            sides,
        )
    for column, (name, axes, sides) in enumerate(CUTS):
        draw(boxes[2, column], name, sharding.cut((SIZE, SIZE), *axes), sides)
    figure.suptitle("Mesh data 2 x fsdp 2 x tensor 2: the devices (0 to 7) that hold each part", fontsize=13)
    out = Path(__file__).parents[1] / "docs" / "scaling" / "sharding.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def draw(box, name: str, sharding: jax.sharding.NamedSharding, sides: tuple[str, str]) -> None:
    """Draw an array of 8 x 8, its parts coloured and labelled with the devices that hold them."""
    parts: dict[tuple[int, int, int, int], list[int]] = {}
    for device, (rows, columns) in sharding.devices_indices_map((SIZE, SIZE)).items():
        (top, bottom, _), (left, right, _) = rows.indices(SIZE), columns.indices(SIZE)
        parts.setdefault((top, bottom, left, right), []).append(device.id)
    for number, ((top, bottom, left, right), devices) in enumerate(sorted(parts.items())):
        colour = f"C{number}" if len(parts) > 1 else "0.75"
        box.add_patch(
            Rectangle((left, top), right - left, bottom - top, facecolor=colour, edgecolor="white", alpha=0.75)
        )
        text = " ".join(map(str, devices)) if len(devices) < 8 else "all"
        box.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=11)
    box.set(xlim=(0, SIZE), ylim=(SIZE, 0), xticks=[], yticks=[], ylabel=sides[0], xlabel=sides[1], aspect="equal")
    box.set_title(name, fontsize=10)


if __name__ == "__main__":
    main()

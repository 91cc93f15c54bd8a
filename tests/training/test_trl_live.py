"""Losses, gradients and trained tokens of logged rows against those of TRL's own trainers.

`.ci/more models` installs torch and trl and runs these tests. One tiny model of random weights is read by both sides.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxft
from jaxft.core.types import Batch
from jaxft.models.hf import save_model
from jaxft.rollout.chat import ChatTemplate, find_stop_ids
from jaxft.rollout.tokenizer import load_tokenizer
from jaxft.training.batch import BatchPlanner, Row, make_batch
from jaxft.training.logged import logged_sequences, read_logged

pytestmark = pytest.mark.models

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

TURNS = ("add two", "four", "and one?", "five")
SAID = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, TURNS, strict=True)]
MARKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMPLETIONS = [
    {"prompt": SAID[:1], "completion": SAID[1:2]},
    {"prompt": SAID[:3], "completion": SAID[3:]},
    {"prompt": [{"role": "user", "content": "x" * 20}], "completion": [{"role": "assistant", "content": "y"}]},
    {"prompt": SAID[:1], "completion": [{"role": "assistant", "content": "a longer answer than the others"}]},
]
PAIRS = [
    {"prompt": SAID[:1], "chosen": SAID[1:2], "rejected": [{"role": "assistant", "content": "a wrong one"}]},
    {"prompt": SAID[:3], "chosen": SAID[3:], "rejected": [{"role": "assistant", "content": "no"}]},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a model and of its reference, with a tokenizer."""
    config, tokenizer = jaxft.model_preset("qwen3-50k"), load_tokenizer()
    tokenizer.chat_template = MARKING
    made = []
    for seed in (0, 1):
        model, params = jaxft.init_model(config, jax.random.key(seed))
        folder = tmp_path_factory.mktemp("model") / str(seed)
        save_model(folder, model, params, tokenizer)
        made.append(folder)
    return made


def sequences(folder, rows):
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(tokenizer, find_stop_ids(tokenizer, folder))
    return [each for row in rows for each in logged_sequences(read_logged(row), template)]


def batch_of(rows, packed, pairs=False):
    width = 1 + max(len(row.tokens) for row in rows)
    planner = BatchPlanner(width * len(rows), packed, pairs)
    return make_batch([Row(row, index) for index, row in enumerate(rows)], planner).batch


def gradients(loss_fn, folder, batch, tmp_path):
    """Return loss and gradients of ours, by the names of the tensors in files."""
    model, params = jaxft.load_model(folder)
    batch = Batch(**{name: None if table is None else jnp.asarray(table) for name, table in batch._asdict().items()})
    (loss, _), grads = jax.jit(jax.value_and_grad(lambda p: loss_fn(model, p, batch), has_aux=True))(params)
    save_model(tmp_path / "grads", model, grads)
    return float(loss), load_file(tmp_path / "grads" / "model.safetensors")


def trainer_of(kind, config_type, folder, rows, tmp_path, **options):
    """Return a trainer of TRL, and the batch that it makes of all rows."""
    config = config_type(
        output_dir=str(tmp_path), per_device_train_batch_size=len(rows), report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None, dataloader_pin_memory=False, **options
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    made = kind(model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    made.model.eval()
    features = [made.train_dataset[index] for index in range(len(rows))]
    return made, made.data_collator(features)


def compare(trainer, batch, ours, grads):
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert abs(float(loss) - ours) <= 1e-5 * max(1.0, abs(ours))
    compared = 0
    for name, parameter in trainer.model.named_parameters():
        if name in grads:
            scale = max(1.0, float(parameter.grad.abs().max()))
            np.testing.assert_allclose(grads[name], parameter.grad.numpy(), rtol=0, atol=1e-5 * scale, err_msg=name)
            compared += 1
    assert compared >= len(grads) - 1 > 10


@pytest.mark.parametrize("packed", [False, True])
def test_supervised_loss_and_gradients_are_those_of_trl(folders, tmp_path, packed):
    rows = sequences(folders[0], COMPLETIONS)
    trainer, batch = trainer_of(
        trl.SFTTrainer, trl.SFTConfig, folders[0], COMPLETIONS, tmp_path, completion_only_loss=True
    )
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        length = len(row.tokens)
        assert ids[:length].tolist() == row.tokens
        assert (labels[:length] != -100).tolist() == row.completion_mask
    compare(trainer, batch, *gradients(jaxft.sft_loss, folders[0], batch_of(rows, packed), tmp_path))


def test_the_answers_of_several_turns_are_those_that_trl_trains(folders, tmp_path):
    rows = [{"messages": SAID}, {"messages": SAID[:2]}]
    ours = sequences(folders[0], rows)
    _, batch = trainer_of(trl.SFTTrainer, trl.SFTConfig, folders[0], rows, tmp_path, assistant_only_loss=True)
    for row, labels in zip(ours, batch["labels"], strict=True):
        assert (labels[: len(row.tokens)] != -100).tolist() == row.completion_mask


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_preference_loss_and_gradients_are_those_of_trl(folders, tmp_path, kind):
    rows = sequences(folders[0], PAIRS)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)

    def made(model, args, train_dataset, processing_class):
        return trl.DPOTrainer(model, reference, args, train_dataset=train_dataset, processing_class=processing_class)

    trainer, batch = trainer_of(made, trl.DPOConfig, folders[0], PAIRS, tmp_path, beta=0.3, loss_type=[kind])
    model, params = jaxft.load_model(folders[1])
    ours = batch_of(rows, packed=False, pairs=True)
    tables = Batch(**{name: None if x is None else jnp.asarray(x) for name, x in ours._asdict().items()})
    scores = jax.jit(partial(jaxft.score_batch, model))(params, tables)
    normalized = {"length_normalized": True} if kind == "ipo" else {}  # as TRL has it for IPO
    loss = partial(jaxft.dpo_loss, beta=0.3, kind=kind, **normalized)
    compare(trainer, batch, *gradients(loss, folders[0], ours._replace(ref_logprobs=scores.logprobs), tmp_path))

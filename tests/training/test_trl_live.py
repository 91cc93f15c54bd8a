"""Losses, gradients and trained tokens of logged rows against those of TRL's own trainers, for every chat template.

`.ci/more models` installs torch and trl and runs these tests. Tiny models of random weights are read by both sides.
"""

from functools import cache, partial
from pathlib import Path

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
from tests.rollout.test_responses import make_template
from tests.rollout.test_tokenizers import KINDS

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


def marking():
    """The embedded tokenizer with a template that marks its answers."""
    tokenizer = load_tokenizer()
    tokenizer.chat_template = MARKING
    return tokenizer


def byte_level(name):
    """A tokenizer of bytes with the template of a family."""
    return make_template(name, load_tokenizer()).tokenizer


def shipped(name, kind):
    """A tokenizer with a template of TRL's, for which TRL has another one with marks."""
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    return tokenizer


TOKENIZERS = {
    "marking": marking,
    "jaxft": load_tokenizer,
    **KINDS,
    **{name: partial(byte_level, name) for name in ("ministral", "qwen3_5", "smollm3")},
}
"""Tokenizers that have, among them, every chat template of the tests, and that of jaxft."""
KINDS_OF_TRL = {"llama3": "llama3", "gemma": "gemma", "gemma3": "gemma", "phi3": "phi3", "phi3_5": "phi3"}
KINDS_OF_TRL |= dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507"), "qwen")
OF_TRL = {f"trl_{name}": partial(shipped, name, kind) for name, kind in KINDS_OF_TRL.items()}
CONFIG = jaxft.model_preset("qwen3-50k", vocab_size=512)
WIDTH = 320


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes the folder of a tokenizer and a model, of other weights for another seed; all have the same shapes."""

    @cache
    def make(name="marking", seed=0):
        model, params = jaxft.init_model(CONFIG, jax.random.key(seed))
        folder = tmp_path_factory.mktemp(name)
        save_model(folder, model, params, (TOKENIZERS | OF_TRL)[name]())
        return folder

    return make


def sequences(folder, rows):
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(tokenizer, find_stop_ids(tokenizer, folder))
    return [each for row in rows for each in logged_sequences(read_logged(row), template)]


def batch_of(rows, packed, pairs=False):
    planner = BatchPlanner(WIDTH * len(rows), packed, pairs)
    return make_batch([Row(row, index) for index, row in enumerate(rows)], planner).batch


@partial(jax.jit, static_argnums=(0, 1))
def value_and_grad(loss_fn, model, params, batch):
    return jax.value_and_grad(lambda p: loss_fn(model, p, batch), has_aux=True)(params)


def gradients(loss_fn, folder, batch, tmp_path):
    """Return loss and gradients of ours, by the names of the tensors in files."""
    model, params = jaxft.load_model(folder)
    batch = Batch(**{name: None if table is None else jnp.asarray(table) for name, table in batch._asdict().items()})
    (loss, _), grads = value_and_grad(loss_fn, model, params, batch)
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
    assert abs(float(loss) - ours) <= 1e-5 * abs(ours)
    compared = 0
    for name, parameter in trainer.model.named_parameters():
        if name in grads:
            scale = float(parameter.grad.abs().max())
            np.testing.assert_allclose(grads[name], parameter.grad.numpy(), rtol=0, atol=1e-5 * scale, err_msg=name)
            compared += 1
    assert compared >= len(grads) - 1 > 10


@pytest.mark.parametrize(("name", "packed"), [("marking", True), *((name, False) for name in TOKENIZERS)])
def test_supervised_loss_and_gradients_are_those_of_trl(folder_of, tmp_path, name, packed):
    folder = folder_of(name)
    rows = sequences(folder, COMPLETIONS)
    trainer, batch = trainer_of(trl.SFTTrainer, trl.SFTConfig, folder, COMPLETIONS, tmp_path, completion_only_loss=True)
    tokenizer = trainer.processing_class
    for row, ids, labels in zip(rows, batch["input_ids"], batch["labels"], strict=True):
        length = len(row.tokens)
        assert ids[:length].tolist() == row.tokens
        assert (labels[:length] != -100).tolist() == row.completion_mask
        # TRL also trains what the template writes behind the end of the answer, which no sampler asks for.
        assert tokenizer.decode(ids[length:], skip_special_tokens=True).strip() == ""
        labels[length:] = -100
    compare(trainer, batch, *gradients(jaxft.sft_loss, folder, batch_of(rows, packed), tmp_path))


@pytest.mark.parametrize("name", ["marking", *OF_TRL])
def test_the_answers_of_several_turns_are_those_that_trl_trains(folder_of, tmp_path, name):
    folder = folder_of(name)
    turns = 2 if name == "trl_qwen3" else 4  # with marks it writes earlier answers in another way
    rows = [{"messages": SAID[:turns]}, {"messages": SAID[:2]}]
    trainer, batch = trainer_of(trl.SFTTrainer, trl.SFTConfig, folder, rows, tmp_path, assistant_only_loss=True)
    for row, ids, labels in zip(sequences(folder, rows), batch["input_ids"], batch["labels"], strict=True):
        ours = np.array(row.completion_mask)
        theirs = (labels[: len(row.tokens)] != -100).numpy()
        assert ids[: len(row.tokens)].tolist() == row.tokens and theirs[ours].all()
        # TRL also trains line breaks behind the ends of answers.
        assert trainer.processing_class.decode(ids[: len(row.tokens)][theirs & ~ours]).strip() == ""


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_preference_loss_and_gradients_are_those_of_trl(folder_of, tmp_path, kind):
    folders = [folder_of(seed=seed) for seed in (0, 1)]
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

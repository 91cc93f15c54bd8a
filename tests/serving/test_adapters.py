"""Adapters that are served beside their base, whose weights they share."""

import asyncio

import jax
import numpy as np
import pytest

from jaxft.cli import main
from jaxft.components.configs import LocalPolicyConfig
from jaxft.components.model_source import add_adapters, model_configuration
from jaxft.errors import ConfigError
from jaxft.harness.commands import open_models
from jaxft.harness.config import load_models
from jaxft.harness.strict_yaml import dump_yaml
from jaxft.models.config import LoraSpec
from jaxft.models.decoder import decoder, parameter_shapes
from jaxft.models.hf import save_model
from jaxft.models.peft import load_adapter, save_adapter
from jaxft.rollout.client import ChatClient
from tests.serving.conftest import QUESTION

SPECS = {"first": LoraSpec(5, 4.0, ("q_proj", "v_proj", "down_proj")), "second": LoraSpec(7, 8.0, ("*_proj",))}


@pytest.fixture(scope="module")
def adapters(policy):
    """Parameters with adapters by name."""
    base, draw = policy.weights.trained, np.random.default_rng(0)

    def changed(shape):
        return draw.normal(0, 0.1, shape.shape).astype(np.float32)

    shapes = {name: parameter_shapes(policy.model.config, lora)["adapter"] for name, lora in SPECS.items()}
    return {name: {"base": base, "adapter": jax.tree.map(changed, each)} for name, each in shapes.items()}


@pytest.fixture(scope="module")
def folder(policy, adapters, tokenizer, tmp_path_factory):
    """A base, a folder of adapters, and a run with others."""
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base", policy.model, policy.weights.trained, tokenizer=tokenizer)
    for name, place in (("first", folder / "first"), ("second", folder / "second" / "model")):
        model = decoder(policy.model.config, lora=SPECS[name])
        save_adapter(place, model, adapters[name], base=str(folder / "base"), tokenizer=tokenizer)
    return folder


def test_an_adapter_answers_as_the_model_that_has_it(folder, adapters, make_policy):
    policy, lora = make_policy(), SPECS["first"]
    params = load_adapter(folder / "first", policy.model.config, policy.weights.trained)

    async def ask():
        clients = ChatClient(policy), ChatClient(policy, "first", adapter=await policy.add_adapter(lora, params))
        return await asyncio.gather(*(each.chat(QUESTION, max_tokens=8, temperature=0.7) for each in clients))

    base, reply = asyncio.run(ask())
    model = decoder(policy.model.config, lora=lora)

    @jax.jit
    def score(params, tokens, positions):
        return jax.nn.log_softmax(model.unembed(params, model.apply(params, tokens, positions)[0]) / 0.7)

    tokens = np.array([reply.prompt_ids + reply.token_ids], np.int32)
    wanted = np.asarray(score(adapters["first"], jax.device_put(tokens), jax.device_put(np.arange(tokens.size)[None])))
    places = np.arange(len(reply.prompt_ids), tokens.size)
    np.testing.assert_allclose(reply.logprobs, wanted[0, places - 1, tokens[0, places]], atol=1e-4)
    assert abs(np.subtract(reply.logprobs[:1], base.logprobs[:1])).max() > 1e-3 or reply.token_ids != base.token_ids


@pytest.mark.slow
def test_all_adapters_of_a_command_share_the_engine_of_their_base(folder):
    models = model_configuration(folder / "base", context_tokens=96)
    add_adapters(models, [f"{name}={folder / name}" for name in SPECS], has_source=True)

    async def main():
        async with open_models(load_models(models, [], "it")) as builder:
            llms = {name: await builder.get_llm(name) for name in builder.config.llms}
            assert [*llms] == ["policy", *SPECS] and all(llm.policy.version == 0 for llm in llms.values())
            replies = await asyncio.gather(*(llm.chat(QUESTION, max_tokens=8, seed=0) for llm in llms.values()))
            assert len({tuple(reply.logprobs) for reply in replies}) == 3
            assert len({id(llm.policy.engine) for llm in llms.values()}) == 1
            assert len({0, *(llms[name].adapter.seed for name in SPECS)}) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base": {"lora": {"rank": 2}}}, "llms.own.snapshot_of: 'base' has lora or a mesh"),
        ({"base": {"mesh": {}}}, "llms.own.snapshot_of: 'base' has lora or a mesh"),
        ({"own": {"every": 3}}, "llms.own: has 'every' beside 'adapter'"),
        ({"own": {"snapshot_of": None, "preset": "qwen3-50k"}}, "llms.own: has 'adapter', but no 'snapshot_of'"),
    ],
)
def test_a_base_that_adapters_cannot_share_is_refused(changes, told):
    entries = {"base": {"preset": "qwen3-50k"}, "own": {"snapshot_of": "base", "adapter": "folder"}}
    llms = {name: {"_type": "local_policy", **each, **changes.get(name, {})} for name, each in entries.items()}
    with pytest.raises(ConfigError, match=told):
        load_models({"llms": llms}, [], "it")


def test_sizes_of_an_adapter_are_those_of_its_base():
    with pytest.warns(FutureWarning, match="cache_tokens, slots beside 'adapter' .*'base' hold"):
        LocalPolicyConfig(snapshot_of="base", adapter="folder", slots=3, cache_tokens=64)


@pytest.mark.parametrize("given", ["first", "=first", "first=", "policy=first"])
def test_an_adapter_of_the_command_line_has_a_name_of_its_own_and_a_folder(folder, given, capsys):
    assert main(["serve", str(folder / "base"), "--adapter", given]) == 2
    assert repr(given) in capsys.readouterr().err


def test_adapters_of_a_file_are_written_there(tmp_path, capsys):
    (tmp_path / "run.yml").write_text(dump_yaml({"llms": {"policy": {"_type": "local_policy", "preset": "qwen3-50k"}}}))
    assert main(["serve", "--config-file", str(tmp_path / "run.yml"), "--adapter", "a=b"]) == 2
    assert "snapshot_of" in capsys.readouterr().err

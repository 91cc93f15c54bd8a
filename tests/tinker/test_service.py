"""Tests of the verbs in process: training equals jaxft's own update, states are restored bit for bit, samples."""

import asyncio
import itertools

import jax
import numpy as np
import optax
import pytest

import jaxft
from jaxft.errors import NonFiniteError
from jaxft.tinker import service as module
from jaxft.tinker.data import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams
from jaxft.tinker.losses import LOSSES, make_parts
from jaxft.tinker.service import Gone, Service

pytestmark = pytest.mark.slow  # the programs of an update, twice

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LENGTHS = (8, 24, 16, 16)  # 64 targets, a power of 2, so that weights of 1/64 scale without rounding


def make_data(seed=0, weight=1 / 64):
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 256, length + 1).astype(np.int32) for length in LENGTHS]
    return [make_datum(row, weight) for row in rows]


def make_datum(row, weight):
    inputs = {"target_tokens": row[1:], "weights": np.full(len(row) - 1, weight)}
    return Datum(model_input=row[:-1], loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def service(policy, tmp_path_factory):
    return Service(policy, "Qwen/Qwen3-50k", tmp_path_factory.mktemp("states"), tokens=64)


def run(coroutine):
    async def main():
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(main())


numbers = itertools.count()


async def new_model(service, rank=4, **fields):
    session = (await service.create_session())["session_id"]
    config = LoraConfig(rank=rank, seed=7, **fields)
    made = await service.create_model(session, next(numbers), service.name, config)
    return session, made["model_id"]


def arrays(service, model_id):
    state = service.model(model_id).state
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params["adapter"], state.opt_state.inner_state))]


def as_sft(batch):
    """The same rows for jaxft's own loss, which scores the tokens that it reads."""
    tokens = np.where(batch.completion_mask, batch.targets, batch.tokens)
    return batch._replace(tokens=tokens, targets=None, advantages=None)


def test_steps_of_weights_are_those_of_sft_bit_for_bit(service, policy):
    data, steps = make_data(), 2

    async def main():
        _, model_id = await new_model(service)
        before = jax.tree.map(np.asarray, service.model(model_id).state.params["adapter"])
        await service.forward_backward(model_id, make_data(weight=3e38), "cross_entropy")
        lost = (await service.optim_step(model_id, ADAM))["metrics"]
        assert lost["nonfinite_updates"] == 1 and "grad_norm" not in lost
        for _ in range(steps):
            found = await service.forward_backward(model_id, data, "cross_entropy")
            metrics = (await service.optim_step(model_id, ADAM))["metrics"]
        return model_id, before, found, metrics

    model_id, before, found, metrics = run(main())
    trained = service.model(model_id)
    plain = optax.adamw(ADAM.learning_rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    update = jaxft.make_update(trained.model, jaxft.sft_loss, plain)
    params = {"base": policy.weights.trained, "adapter": jax.device_put(before)}
    state = jaxft.init_train_state(params, plain, trained.model)
    for _ in range(steps):
        state, own = update(state, [as_sft(batch) for _, batch in make_parts(data, LOSSES["cross_entropy"], 64)])
    ours, wanted = (jax.tree.leaves(each.params["adapter"]) for each in (trained.state, state))
    assert all(np.array_equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert metrics["applied_updates"] == 1 and metrics["grad_norm"] == float(own["grad_norm"])
    assert found.metrics["loss:sum"] == pytest.approx(float(own["loss"]), rel=1e-6)
    assert [len(each["logprobs"].data) for each in found.loss_fn_outputs] == list(LENGTHS)


def test_a_saved_state_continues_bit_for_bit_in_its_model_in_a_new_one_and_after_a_restart(service, policy):
    data = make_data(1)

    async def train(service, model_id):
        await service.forward_backward(model_id, data, "cross_entropy")
        await service.optim_step(model_id, ADAM)

    async def main():
        _, first = await new_model(service)
        await train(service, first)
        path = (await service.save_weights(first, "a"))["path"]
        await train(service, first)
        wanted = arrays(service, first)
        restarted = Service(policy, service.name, service.states.folder, tokens=64)
        other = (await restarted.create_session())["session_id"]
        second = (await restarted.load_weights(path, True, session_id=other, model_seq_id=0))["model_id"]
        await service.forward_backward(first, data, "cross_entropy")  # which no step takes
        await service.load_weights(path, True, model_id=first)
        for each, model_id in ((service, first), (restarted, second)):
            await train(each, model_id)
            found = arrays(each, model_id)
            assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        with pytest.raises(ValueError, match="/weights/a is there already"):
            await service.save_weights(first, "a")
        with pytest.raises(ValueError, match=r"weights/b: there is no such saved state"):
            await service.load_weights(path[:-1] + "b", True, model_id=first)
        other = Service(policy, "Other", service.states.folder)
        with pytest.raises(ValueError, match="base_model is 'Qwen/Qwen3-50k'; served is Other"):
            await other.create_sampling_session((await other.create_session())["session_id"], 0, model_path=path)
        light = (await service.save_weights_for_sampler(first, "s"))["path"]
        with pytest.raises(ValueError, match="saved for samplers"):
            await service.load_weights(light, True, model_id=first)
        listed = [each["tinker_path"] for each in service.states.listed(first)]
        assert listed == [path, light]
        page = await service.list_checkpoints(first, 1, 1)
        assert [each["tinker_path"] for each in page["checkpoints"]] == [light] and page["cursor"]["total_count"] == 2
        service.states.file(light).write_bytes(b"cut")
        with pytest.raises(ValueError, match=r"s\.safetensors is damaged"):
            await service.list_checkpoints()
        service.states.file(light).unlink()

    run(main())


def test_samplers_keep_their_weights_and_score_as_training_does(service):
    data = make_data(2, weight=1.0)
    prompt = data[0].model_input.tolist()

    async def main():
        session, model_id = await new_model(service)

        async def sampler(number):
            made = await service.save_weights_for_sampler(model_id, sampling_session_seq_id=number)
            return made["sampling_session_id"]

        async def sampled(sampler_id):
            asked = SamplingParams(max_tokens=6, stop=[])
            found = await service.sample(
                sampler_id, ModelInput.from_ints(prompt), asked, num_samples=2, prompt_logprobs=True
            )
            tokens = [tuple(each.tokens) for each in found.sequences]
            assert all(len(each) == 6 for each in tokens)
            return tokens, found.sequences, found.prompt_logprobs

        base = (await service.create_sampling_session(session, 7, base_model=service.name))["sampling_session_id"]
        before = await sampler(0)
        tokens, _, scores = await sampled(before)
        assert np.array_equal(scores, (await sampled(base))[2])  # fresh adapters change nothing
        context = service._policy.engine.max_context_tokens
        full = (prompt * context)[:context]
        whole = await service.sample(
            base, ModelInput.from_ints(full), SamplingParams(max_tokens=1), prompt_logprobs=True
        )
        assert len(whole.prompt_logprobs) == context and not whole.sequences[0].tokens
        with pytest.raises(ValueError, match=r"prompt\[95\] is 999; wanted a token below 262"):
            await service.sample(base, ModelInput.from_ints([*full[1:], 999]), SamplingParams(), prompt_logprobs=True)
        for _ in range(3):
            await service.forward_backward(model_id, data, "cross_entropy")
            await service.optim_step(model_id, ADAM)
        after = await sampler(1)
        new, completions, trained = await sampled(after)
        assert (await sampled(before))[0] == tokens != new
        assert sum(trained[1:]) > sum(scores[1:]) + 1 and trained[0] is None
        row = np.array([*prompt, *new[0]], np.int32)
        found = await service.forward_backward(model_id, [make_datum(row, 0)], "cross_entropy", forward_only=True)
        scored = found.loss_fn_outputs[0]["logprobs"].data
        np.testing.assert_allclose(scored[len(prompt) - 1 :], completions[0].logprobs, atol=1e-5)
        await service.finish_session(session)
        with pytest.raises(Gone, match=session):
            await service.optim_step(model_id, ADAM)

    run(main())


def test_clients_at_once_get_what_each_gets_alone(service):
    prompt = ModelInput.from_ints(range(1, 9))

    async def train(rank, seed):
        session = (await service.create_session())["session_id"]
        model_id = (await service.create_model(session, 0, service.name, LoraConfig(rank=rank, seed=seed)))["model_id"]
        found = []
        for step in range(3):
            await service.forward_backward(model_id, make_data(seed + step), "cross_entropy")
            await service.optim_step(model_id, ADAM)
            made = await service.save_weights_for_sampler(model_id, sampling_session_seq_id=step)
            asked = SamplingParams(max_tokens=6, stop=[])
            sampled = await service.sample(made["sampling_session_id"], prompt, asked, seq_id=step)
            found.append((sampled.sequences[0].tokens, sampled.sequences[0].logprobs))
        weights = arrays(service, model_id)
        await service.finish_session(session)
        return found, weights

    async def sample_base():
        session = (await service.create_session())["session_id"]
        sampler = (await service.create_sampling_session(session, 0))["sampling_session_id"]
        asked = SamplingParams(max_tokens=8, stop=[], temperature=0.7)
        found = [await service.sample(sampler, prompt, asked, seq_id=i, num_samples=2) for i in range(4)]
        await service.finish_session(session)
        return [each.tokens for one in found for each in one.sequences]

    async def main():
        before = set(service.sessions)
        clients = [lambda: train(4, 1), lambda: train(8, 2), sample_base]
        alone = [await client() for client in clients]
        together = await asyncio.gather(*(client() for client in clients))
        assert alone[2] == together[2]
        for (samples, weights), (own_samples, own_weights) in zip(together[:2], alone[:2], strict=True):
            assert samples == own_samples
            assert all(np.array_equal(a, b) for a, b in zip(weights, own_weights, strict=True))
        assert set(service.sessions) == before

    run(main())


def test_what_is_impossible_is_refused_by_name(service):
    async def main():
        session, model_id = await new_model(service)
        fresh = LoraConfig(rank=2)
        faults = [
            (
                service.create_model(session, 0, "Qwen/Other", fresh),
                "base_model is 'Qwen/Other'; served is Qwen/Qwen3-50k",
            ),
            (service.create_model("gone", 0, service.name, fresh), "no session 'gone'"),
            (service.save_weights(model_id, "../a"), r"no path of a saved state"),
            (service.save_weights(model_id, ".a"), r"'.a' is no name"),
            (service.load_weights("tinker://a/weights/b", False, model_id=model_id), "no such saved state"),
            (service.create_sampling_session(session, 0, model_path="a"), "'a' is no path of a saved state"),
        ]
        for verb, told in faults:
            with pytest.raises(ValueError, match=told):
                await verb
        sampler = (await service.create_sampling_session(session, 0))["sampling_session_id"]
        for given, told in [
            (SamplingParams(stop=""), "empty"),
            (SamplingParams(temperature=-1.0), "temperature is -1.0"),
        ]:
            with pytest.raises(ValueError, match=told):
                await service.sample(sampler, ModelInput.from_ints((1, 2)), given)
        assert (await service.optim_step(model_id, AdamParams()))["metrics"]["nothing_to_learn"] == 1
        await service.finish_session(session)

    run(main())


def test_samplers_that_are_not_used_leave(service, monkeypatch):
    monkeypatch.setattr(module, "MOST_SAMPLERS", 2)

    async def main():
        session, model_id = await new_model(service)
        asked, samplers, tokens = SamplingParams(max_tokens=3, stop=[]), [], []
        row = ModelInput.from_ints((1, 2, 3))
        for number in range(3):
            made = await service.save_weights_for_sampler(model_id, sampling_session_seq_id=number)
            samplers.append(made["sampling_session_id"])
            await service.sample(samplers[-1], row, asked)
            found = await service.sample(samplers[0], row, asked)  # which keeps the first one
            tokens.append(found.sequences[0].tokens)
        assert tokens[0] == tokens[1] == tokens[2]
        with pytest.raises(Gone, match="sample:1"):
            await service.sample(samplers[1], row, asked)
        assert [*service.sessions[session].samplers] == [samplers[2], samplers[0]]
        await service.finish_session(session)

    run(main())


def test_the_samples_of_a_call_end_with_the_first_that_fails(service):
    """Samples that wait for a slot would fail like the first, and hold up the requests of other clients."""

    async def main():
        session, model_id = await new_model(service)
        model = service.model(model_id)
        diverged = jax.tree.map(lambda leaf: np.nan * leaf, model.state.params["adapter"])
        model.state = model.state._replace(params={**model.state.params, "adapter": diverged})
        sampler = (await service.save_weights_for_sampler(model_id, None, next(numbers)))["sampling_session_id"]
        prompt = ModelInput.from_ints([1, 2])
        with pytest.raises(NonFiniteError):
            await service.sample(sampler, prompt, SamplingParams(max_tokens=8), num_samples=100)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0)
        await service.finish_session(session)
        return [task for task in left if not task.done()]

    assert not run(main())

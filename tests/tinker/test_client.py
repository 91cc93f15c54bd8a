"""Tests of the clients without a socket."""

import asyncio
import concurrent.futures

import numpy as np
import pytest

from jaxft import tinker
from jaxft.tinker.client import APIFuture


@pytest.mark.parametrize("ends", [False, True])
def test_a_verb_goes_on_when_nobody_waits_for_it_but_sampling_ends(ends):
    future = concurrent.futures.Future()

    async def wait():
        await asyncio.wait_for(APIFuture(future, ends=ends), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert future.cancelled() == ends  # or a part of a batch's gradients would be left for the next step


@pytest.mark.slow  # the programs of an update
def test_a_script_for_tinker_trains_and_samples_without_a_socket(policy, tmp_path, no_sockets):
    service = tinker.ServiceClient(policy, folder=tmp_path)
    client = service.create_lora_training_client(base_model=service.model_name, rank=4, seed=1).result()
    tokens = np.arange(1, 18)
    row = tinker.ModelInput.from_ints(tokens[:-1])
    inputs = {"target_tokens": tokens[1:].tolist(), "weights": np.ones(16, np.float32)}
    data = [tinker.Datum(model_input=row, loss_fn_inputs=inputs)] * 2
    losses = []
    for _ in range(3):
        found, step = (
            client.forward_backward(data, "cross_entropy"),
            client.optim_step(tinker.AdamParams(learning_rate=0.05)),
        )
        losses.append(found.result().metrics["loss:sum"])
        assert step.result().metrics["applied_updates"] == 1
    assert losses[2] < losses[0] - 1
    sampler = client.save_weights_and_get_sampling_client().result()

    async def sampled():
        return await sampler.sample(row, 2, tinker.SamplingParams(max_tokens=3, stop=[]))

    first, second = asyncio.run(sampled()).sequences
    assert len(first.tokens) == len(second.logprobs) == 3
    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
    found = client.forward(data[:1], "cross_entropy").result()
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], found.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-6)
    path = client.save_state("a").result().path
    other = tinker.ServiceClient(service).create_training_client_from_state_with_optimizer(path).result()
    again = [each.forward_backward(data, "cross_entropy").result().metrics["loss:sum"] for each in (client, other)]
    assert again[0] == again[1]
    with pytest.raises(ValueError, match="'dpo'"):
        client.forward(data, "dpo").result()
    service.close().result()

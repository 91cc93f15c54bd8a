"""Tinker's own client over loopback: training equals the same calls in process, custom losses, errors."""

import asyncio
import importlib.util

import jax
import numpy as np
import pytest

from jaxft.serving.server import Server
from jaxft.tinker.app import make_app
from jaxft.tinker.data import AdamParams, Datum, LoraConfig
from jaxft.tinker.service import Service
from jaxft.tinker.wire import CLASSES

pytestmark = [pytest.mark.tinker, pytest.mark.skipif(not importlib.util.find_spec("tinker"), reason="no tinker")]
NAME = "Qwen/Qwen3-8B-Base"


@pytest.fixture(scope="module")
def service(policy, tmp_path_factory):
    return Service(policy, NAME, tmp_path_factory.mktemp("states"), tokens=128)


@pytest.fixture(scope="module")
def url(service):
    server = Server(make_app(service), api_key="tml-secret")
    yield server.url
    asyncio.run(server.close())


@pytest.fixture
def client(url, monkeypatch):
    import tinker  # which is not installed beside the other tests

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    made = tinker.ServiceClient(base_url=url, api_key="tml-secret")
    yield made
    made.close("success").result()


def rows(seed, lengths=(7, 20, 33)):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, length + 1) for length in lengths]


def as_data(tinker, rows, **inputs):
    return [
        tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].astype(np.int64), **{k: f(row) for k, f in inputs.items()}},
        )
        for row in rows
    ]


def test_training_is_that_in_process_and_continues_from_a_saved_state(client, service):
    import tinker

    trained = client.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
    assert trained.get_info().lora_rank == 4 and trained.get_info().model_data.model_name == NAME
    adam = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

    def ones(row):
        return np.ones(len(row) - 1, np.float32)

    found = []
    for step in range(3):
        first = trained.forward_backward(as_data(tinker, rows(step), weights=ones), "cross_entropy")
        second = trained.optim_step(tinker.AdamParams(**adam))
        found.append((first.result(), second.result().metrics))

    async def in_process():
        session = (await service.create_session())["session_id"]
        model_id = (await service.create_model(session, 0, NAME, LoraConfig(rank=4, seed=3)))["model_id"]
        for step, (first, metrics) in enumerate(found):
            data = [
                Datum(model_input=row[:-1], loss_fn_inputs={"target_tokens": row[1:], "weights": ones(row)})
                for row in rows(step)
            ]
            own = await service.forward_backward(model_id, data, "cross_entropy")
            assert first.metrics == own.metrics
            for output, ours in zip(first.loss_fn_outputs, own.loss_fn_outputs, strict=True):
                assert np.array_equal(output["logprobs"].to_numpy(), ours["logprobs"].to_numpy())
            assert metrics == (await service.optim_step(model_id, AdamParams(**adam)))["metrics"]
        ours = service.model(model_id).state.params["adapter"]
        over_http = service.model(trained.model_id).state.params["adapter"]
        same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), ours, over_http)
        assert all(jax.tree.leaves(same))
        await service.finish_session(session)

    asyncio.run(in_process())
    path = trained.save_state("a").result().path
    assert path == f"tinker://{trained.model_id}/weights/a"
    again = client.create_training_client_from_state_with_optimizer(path).result()
    data = as_data(tinker, rows(9), weights=ones)
    losses = [each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (trained, again)]
    assert losses[0] == losses[1]
    again.forward_backward(as_data(tinker, rows(9), weights=lambda row: 3e38 * ones(row)), "cross_entropy").result()
    assert again.optim_step(tinker.AdamParams()).result().metrics["nonfinite_updates"] == 1
    rest = tinker.RestClient(base_url=client.holder._base_url, api_key="tml-secret")
    assert [each.tinker_path for each in rest.list_checkpoints(trained.model_id).result().checkpoints] == [path]
    assert rest.list_user_checkpoints(limit=1).result().cursor.total_count == 1
    assert rest.get_training_run_by_tinker_path(path).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not rest.list_checkpoints(trained.model_id).result().checkpoints


def test_samples_are_scored_as_the_trainer_scores_them(client):
    import tinker

    trained = client.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints([5, 6, 7, 8])
    params = tinker.types.SamplingParams(max_tokens=5, stop=[])
    futures = [sampler.sample(prompt, 2, params, include_prompt_logprobs=True) for _ in range(8)]
    answers = [future.result() for future in futures]
    ids = {sequence.sequence_id for answer in answers for sequence in answer.sequences}
    assert len(ids) == 16 and len({tuple(answers[i].sequences[0].tokens) for i in range(8)}) > 1
    sequence = answers[0].sequences[0]
    row = np.array([5, 6, 7, 8, *sequence.tokens])
    scored = trained.forward(
        as_data(tinker, [row], weights=lambda row: np.zeros(len(row) - 1, np.float32)), "cross_entropy"
    )
    logprobs = scored.result().loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(logprobs[3:], sequence.logprobs, atol=1e-5)
    np.testing.assert_allclose(answers[0].prompt_logprobs[1:], logprobs[:3], atol=1e-6)
    assert answers[0].prompt_logprobs[0] is None
    with pytest.raises(tinker.UnprocessableEntityError, match="topk_sample_logprobs is 2"):
        sampler.sample(prompt, 1, params, topk_sample_logprobs=2).result()
    seeded = [
        sampler.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=5, stop=[], seed=4)).result() for _ in "12"
    ]
    assert seeded[0].sequences[0].tokens == seeded[1].sequences[0].tokens


def test_a_custom_loss_has_the_gradient_of_the_same_loss_on_the_server(client, service):
    torch = pytest.importorskip("torch")
    import tinker

    def adapters(train):
        trained = client.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
        train(trained).result()
        grads = service.model(trained.model_id).grads
        return [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]

    def ratio_loss(data, logprobs):
        terms = [
            -(
                torch.exp(lp - datum.loss_fn_inputs["logprobs"].to_torch())
                * datum.loss_fn_inputs["advantages"].to_torch()
            )
            for datum, lp in zip(data, logprobs, strict=True)
        ]
        return torch.cat(terms).sum(), {"ratio:mean": 1.0}

    given = {
        "logprobs": lambda row: np.full(len(row) - 1, -5.5, np.float32),
        "advantages": lambda row: np.linspace(-1, 1, len(row) - 1, dtype=np.float32),
    }
    data = as_data(tinker, rows(4), **given)
    custom = adapters(lambda trained: trained.forward_backward_custom(data, ratio_loss))
    own = adapters(lambda trained: trained.forward_backward(data, "importance_sampling"))
    for a, b in zip(custom, own, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_messages_have_the_fields_of_the_client():
    from tinker.proto import tinker_public_pb2

    def compare(own, theirs):
        for field in own.fields:
            found = theirs.fields_by_number[field.number]
            assert (field.name, field.is_repeated) == (found.name, found.is_repeated)
            assert field.type == found.type or {field.type, found.type} <= {3, 5, 8, 13, 14}  # integers, bool, enum
            if field.message_type is not None:
                compare(field.message_type, found.message_type)

    for name in ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"):
        compare(CLASSES[name].DESCRIPTOR, tinker_public_pb2.DESCRIPTOR.message_types_by_name[name])


def test_what_is_not_served_is_refused_by_name(client, url):
    import tinker

    trained = client.create_lora_training_client(base_model=NAME, rank=2).result()
    data = as_data(tinker, rows(1), weights=lambda row: np.ones(len(row) - 1, np.float32))
    with pytest.raises(tinker.RequestFailedError, match="served are cross_entropy, importance_sampling"):
        trained.forward_backward(data, "gspo").result()
    with pytest.raises(
        tinker.UnprocessableEntityError, match=r"rank is 4000: Input should be less than or equal to 256"
    ):
        client.create_lora_training_client(base_model=NAME, rank=4000).result()
    with pytest.raises(tinker.RequestFailedError, match="base_model is 'Other'"):
        client.create_lora_training_client(base_model="Other", rank=4).result()
    with pytest.raises(tinker.UnprocessableEntityError, match=r"adam_params.beta1 is 1.0"):
        trained.optim_step(tinker.AdamParams(beta1=1.0)).result()
    assert trained.optim_step(tinker.AdamParams()).result().metrics["nothing_to_learn"] == 1  # a refusal holds up none
    with pytest.raises(tinker.AuthenticationError):
        tinker.RestClient(base_url=url, api_key="tml-other").get_server_capabilities().result()

"""Sampler-to-trainer correction: each kind by hand, its bounds, and that long rows do not overflow."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft.core.correction import ratio_moments, sampler_correction
from jaxft.core.losses import policy_loss
from jaxft.core.objectives import grpo_loss, score_batch
from jaxft.core.reductions import count_tokens
from jaxft.core.types import Batch
from jaxft.models.quantized import dequantized, quantize

MASK = np.array([[True, True, True, False], [True, True, False, False]])
D = np.log(np.array([[3.0, 0.25, 1.0, 9.0], [1.5, 1.2, 9.0, 9.0]], np.float32))
"""Ratios of the trained tokens: 3, 0.25, 1 (product 0.75, geometric mean 0.909) and 1.5, 1.2 (1.8, 1.342)."""

EXPECTED = {
    "token_truncate": ([[2, 0.25, 1], [1.5, 1.2, 0]], 1 / 5),
    "token_mask": ([[0, 0, 1], [1.5, 1.2, 0]], 2 / 5),
    "sequence_truncate": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_mask": ([[0.75] * 3, [1.8] * 3], 0),
    "sequence_geometric_mask": ([[1] * 3, [1] * 3], 0),
    "ratio": ([[1] * 3, [1] * 3], 2 / 5),
    "none": ([[1] * 3, [1] * 3], 2 / 5),
}


CASES = {name: {"kind": name} for name in EXPECTED} | {
    "high 1.5": {"kind": "sequence_truncate", "high": 1.5},
    "mask, high 1.5": {"kind": "sequence_mask", "high": 1.5},
    "geometric, high 1.3": {"kind": "sequence_geometric_mask", "high": 1.3},
}
PACKED = np.concatenate([D[:1, :3], D[1:, :2]], axis=1)


@pytest.fixture(scope="module")
def corrections():
    """Every case on `D`, and the sums of the weights of a long row with their gradient, in one program."""

    def correct(d, mask, **knobs):
        return sampler_correction(d - 1.0, jnp.full_like(d, -1.0), mask, count_tokens(mask), **knobs)

    @jax.jit
    def of_all(d, mask, long, packed, segments):
        def total(long, kind):
            return correct(long, jnp.ones(long.shape, bool), kind=kind).weights.sum()

        return (
            {name: correct(d, mask, **knobs) for name, knobs in CASES.items()},
            {kind: jax.value_and_grad(total)(long, kind) for kind in EXPECTED},
            sampler_correction(
                packed, jnp.zeros_like(packed), jnp.ones((1, 5), bool), kind="sequence_mask", segment_ids=segments
            ),
            ratio_moments(d, jnp.zeros_like(d), mask, count_tokens(mask)),
        )

    long = np.ones((1, 4000), np.float32)
    return jax.device_get(of_all(D, MASK, long, PACKED, np.array([[1, 1, 1, 2, 2]])))


@pytest.mark.parametrize("kind", EXPECTED)
def test_by_hand(corrections, kind):
    weights, share, old = corrections[0][kind]
    assert (old is None) == (kind != "ratio")
    trained = MASK[:, :3]
    np.testing.assert_allclose(weights[:, :3][trained], np.array(EXPECTED[kind][0])[trained], rtol=1e-5)
    np.testing.assert_allclose(share, EXPECTED[kind][1], rtol=1e-6)


def test_bounds_of_sequences(corrections):
    found = corrections[0]
    assert found["high 1.5"].weights[:, 0].tolist() == pytest.approx([0.75, 1.5])
    weights, share, _ = found["mask, high 1.5"]
    assert weights[:, 0].tolist() == pytest.approx([0.75, 0.0])
    assert float(share) == pytest.approx(2 / 5)
    assert found["geometric, high 1.3"].weights[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_long_rows_neither_overflow_nor_have_a_gradient(corrections, kind):
    weights, gradient = corrections[1][kind]
    assert np.isfinite(weights) and not gradient.any()


def test_segments_are_rows(corrections):
    np.testing.assert_allclose(corrections[2].weights, [[0.75] * 3 + [1.8] * 2], rtol=1e-5)


def test_moments_of_the_ratio(corrections):
    ratios = np.array([3.0, 0.25, 1.0, 1.5, 1.2])
    np.testing.assert_allclose(corrections[3], [ratios.mean(), (ratios**2).mean()], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("token", {}, "correction is 'token'; wanted one of token_truncate"),
        ("token_mask", {"low": 0.0}, "the bounds of the correction are 0.0 and 2.0"),
        ("token_mask", {"high": 0.9}, "the bounds of the correction are 0.5 and 0.9"),
    ],
)
def test_refusals(kind, knobs, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(sampler_correction, kind=kind, **knobs), D, D, MASK)


def tree(params, tokens, positions):
    """Two tokens, whose logits depend on the tokens before."""
    return params["logits"][jnp.where(positions == 0, 0, 1 + tokens)]


TREE = jaxft.from_function(tree)
NOW, BEFORE = (
    {"logits": np.array(rows, np.float32)}
    for rows in ([[0.3, -0.2], [1.0, 0.1], [-0.4, 0.6]], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
)
REWARDS = np.array([1.0, -0.5, 0.25, -2.0])
WIDE = {"clip_low": 1.0, "clip_high": 1e4}  # no clip bites


@pytest.fixture(scope="module", params=[1, 2], ids=["1 token", "2 tokens"])
def stale_gradients(request):
    """Number of tokens, the expected gradients of losses on answers that BEFORE sampled, and the exact gradient.

    The answers are all of this length to one prompt token; exact is the gradient of NOW's expected reward. The last
    result has the gradients on answers that NOW sampled in eight bits.
    """
    length = request.param
    answers = np.array(np.meshgrid(*[[0, 1]] * length, indexing="ij")).reshape(length, -1).T
    tokens, mask = np.pad(answers, ((0, 0), (1, 0))), np.pad(np.ones(answers.shape, bool), ((0, 0), (1, 0)))
    kinds = {"ratio": {}, "token_truncate": {"high": 1e4}, "sequence_truncate": {"high": 1e4}, "none": {}, None: {}}

    @jax.jit
    def gradients(now, before, tokens, mask, rewards):
        batch = Batch(tokens, mask)

        def probabilities(params):
            logprobs = score_batch(TREE, params, batch).logprobs
            return jnp.exp(jnp.where(mask, logprobs, 0.0).sum(axis=1))

        weighted = rewards * probabilities(before) * mask.sum()
        behavior = score_batch(TREE, before, batch).logprobs
        given = batch._replace(advantages=weighted, behavior_logprobs=behavior)

        def estimate(kind):
            options = {"loss": partial(policy_loss, loss="dapo", **WIDE)}
            if kind is not None:
                options["correction"] = partial(sampler_correction, kind=kind, **kinds[kind])
            return -jax.grad(lambda params: grpo_loss(TREE, params, given, **options)[0])(now)["logits"]

        exact = jax.grad(lambda params: (probabilities(params) * rewards).sum())(now)["logits"]
        narrow = {"logits": dequantized(quantize(now["logits"], "fp8"))}
        return {kind: estimate(kind) for kind in kinds if kind}, estimate(None), exact, narrow

    rewards = REWARDS[: 2**length].astype(np.float32)
    of_kinds, uncorrected, exact, narrow = jax.device_get(gradients(NOW, BEFORE, tokens, mask, rewards))
    of_narrow, uncorrected_narrow, _, _ = jax.device_get(gradients(NOW, narrow, tokens, mask, rewards))
    return length, of_kinds | {None: uncorrected}, exact, of_narrow | {None: uncorrected_narrow}


def test_the_corrected_gradient_of_stale_answers_is_that_of_enumeration(stale_gradients):
    """Of several tokens only with the weight of their whole sequence.

    A ratio per token leaves out how likely the policies find the tokens before; here it errs as far as none at all.
    """
    length, gradients, exact, _ = stale_gradients
    biases = [
        np.abs(gradients[kind] - exact).max() / np.abs(exact).max()
        for kind in ("ratio", "token_truncate", "none", None)
    ]
    if length == 1:
        for kind in ("ratio", "token_truncate"):
            np.testing.assert_allclose(gradients[kind], exact, atol=1e-6)
    else:
        assert biases == pytest.approx([0.4264, 0.4264, 0.3068, 0.3068], abs=1e-4)
    np.testing.assert_allclose(gradients["sequence_truncate"], exact, atol=1e-6)


def test_the_corrected_gradient_of_answers_sampled_in_eight_bits_is_that_of_enumeration(stale_gradients):
    length, _, exact, gradients = stale_gradients
    np.testing.assert_allclose(gradients["sequence_truncate"], exact, atol=1e-6)
    biases = {kind: np.abs(gradients[kind] - exact).max() / np.abs(exact).max() for kind in ("token_truncate", None)}
    assert biases[None] > 5e-4
    assert biases["token_truncate"] < (1e-6 if length == 1 else 1e-2), biases


# --- Answers that a length limit cuts: left out, trained, penalised, or carried over to the next collection.

LONGEST, OF_COLLECTION, END = 4, 2, 0


def answers_up_to(longest):
    """All answers of three tokens to one prompt token, padded: `END` ends them, or the length does."""
    ended, going_on = [], [()]
    for _ in range(longest):
        longer = [(*begun, token) for begun in going_on for token in range(3)]
        ended += [answer for answer in longer if answer[-1] == END]
        going_on = [answer for answer in longer if answer[-1] != END]
    answers = ended + going_on
    mask = np.array([[False] + [place < len(answer) for place in range(LONGEST)] for answer in answers])
    return np.array([[0, *answer, *[0] * (LONGEST - len(answer))] for answer in answers]), mask


def reward_of(answer):
    """1 for a single 1 that ends at once, and for three of them, which take more than a collection gives."""
    return float(tuple(answer[:2]) == (1, END) or list(answer).count(1) >= 3)


@pytest.fixture(scope="module")
def gradients_of_cut_answers():
    """A function from the weights to the exact gradient of the expected reward, and what each treatment expects.

    Advantages are rewards less their mean over what is trained. `step` is how far the weights were from those of
    `AFTER` when carried answers began.
    """
    after = np.array([[0.3, 0.5, -0.2], [-0.1, 1.0, 0.1], [0.2, -0.4, 0.6], [-0.3, 0.2, 0.1]], np.float32)
    direction = np.array([[0.5, -1.0, 0.3], [1.0, -0.6, 0.2], [-0.8, 0.4, 0.1], [0.6, -0.7, 0.9]], np.float32)
    tokens, mask = answers_up_to(LONGEST)
    rewards = np.array([reward_of(answer) for answer in tokens[:, 1:]], np.float32)
    cut_tokens, cut_mask = answers_up_to(OF_COLLECTION)
    is_cut = (cut_tokens[:, OF_COLLECTION] != END) & cut_mask[:, OF_COLLECTION]
    cut_rewards = np.where(is_cut, 0.0, [reward_of(answer) for answer in cut_tokens[:, 1:]]).astype(np.float32)
    unbounded = {"high": 1e6}
    corrections = {"none": {}, "ratio": {}, "token_truncate": unbounded, "sequence_truncate": unbounded}

    def logprobs(params, tokens, mask):
        return jnp.where(mask, score_batch(TREE, params, Batch(jnp.array(tokens), jnp.array(mask))).logprobs, 0.0)

    def expected(params, tokens, mask, rewards, behavior, correction=None):
        """The expected gradient of the loss on answers of these log-probabilities, each weighted by its own."""
        probabilities = jnp.exp(behavior.sum(axis=1))
        advantages = rewards - (probabilities * rewards).sum() / probabilities.sum()
        weighted = advantages * probabilities / probabilities.sum() * mask.sum()
        batch = Batch(jnp.array(tokens), jnp.array(mask), advantages=weighted, behavior_logprobs=behavior)
        options = {"loss": partial(policy_loss, loss="dapo", clip_low=1.0, clip_high=1e6)}
        if correction is not None:
            options["correction"] = partial(sampler_correction, kind=correction, **corrections[correction])
        return -jax.grad(lambda params: grpo_loss(TREE, params, batch, **options)[0])(params)["logits"]

    @jax.jit
    def gradients(step):
        params, before = {"logits": jnp.array(after)}, {"logits": after + step * direction}
        exact = jax.grad(lambda params: (jnp.exp(logprobs(params, tokens, mask).sum(axis=1)) * rewards).sum())
        begun, ended = logprobs(before, tokens, mask), logprobs(params, tokens, mask)
        mixed = jnp.where(np.arange(LONGEST + 1) <= OF_COLLECTION, begun, ended)
        cut = logprobs(params, cut_tokens, cut_mask)
        kept = ~is_cut
        of_treatments = {
            "dropped": expected(params, cut_tokens[kept], cut_mask[kept], cut_rewards[kept], cut[kept]),
            "trained": expected(params, cut_tokens, cut_mask, cut_rewards, cut),
            "penalised": expected(params, cut_tokens, cut_mask, cut_rewards - is_cut, cut),
        }
        of_corrections = {kind: expected(params, tokens, mask, rewards, mixed, kind) for kind in corrections}
        return exact(params)["logits"], of_treatments | of_corrections

    return lambda step: jax.device_get(gradients(step))


def test_answers_that_are_left_out_or_penalised_bias_the_gradient(gradients_of_cut_answers):
    """Distance to the exact gradient, as a fraction of its norm, and the cosine with it."""
    exact, found = gradients_of_cut_answers(0.0)
    size = np.linalg.norm(exact)
    table = {
        name: (
            np.linalg.norm(found[name] - exact) / size,
            (found[name] * exact).sum() / np.linalg.norm(found[name]) / size,
        )
        for name in ("dropped", "trained", "penalised")
    }
    assert table["dropped"] == pytest.approx((0.940, 0.921), abs=1e-3)
    assert table["trained"] == pytest.approx((0.411, 0.912), abs=1e-3)
    assert table["penalised"] == pytest.approx((1.615, 0.354), abs=1e-3)


@pytest.mark.parametrize(
    ("step", "errors"),
    [
        (0.0, {"none": 0.0, "ratio": 0.0, "token_truncate": 0.0}),
        (0.1, {"none": 0.095, "ratio": 0.059, "token_truncate": 0.059}),
        (1.0, {"none": 0.710, "ratio": 0.476, "token_truncate": 0.476}),
    ],
)
def test_carried_answers_are_biased_by_the_change_of_the_weights_only(gradients_of_cut_answers, step, errors):
    """With ratios per token by less than without any, with the weight of the whole answer by nothing."""
    exact, found = gradients_of_cut_answers(step)
    distances = {name: np.linalg.norm(found[name] - exact) / np.linalg.norm(exact) for name in errors}
    assert distances == pytest.approx(errors, abs=1e-3 if step else 1e-5)
    np.testing.assert_allclose(found["sequence_truncate"], exact, atol=1e-6)

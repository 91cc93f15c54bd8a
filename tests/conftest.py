"""One tiny policy at one set of shapes, so that tests share what is compiled; made when it is first asked for."""

import asyncio
import gc
import socket
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxft.harness.data_models import EvalInputItem, Trajectory, TrajectoryCollection
from jaxft.rollout.calls import Call, Completion, Prompt, Reply
from jaxft.rollout.current import current_functions, episode
from jaxft.rollout.sequences import TokenSequence

SLOTS, CONTEXT = 8, 96

MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 25_000
"""Linux lets a process map 65,530 pieces of memory. A compiled program takes several, and XLA for CPU ends by a
segmentation fault when there are no more."""


@pytest.fixture(autouse=True, scope="module")
def programs_of_module():
    """After a module, forget what was compiled."""
    yield
    forget_programs()


def forget_programs():
    """Forget what was compiled if it takes too many mappings of memory."""
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def foreign_trajectories():
    """Let adapters train collections that no policy sampled, or an earlier one."""
    from jaxft.components import training_job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_job, "MAX_STALE_FRACTION", 1.0)
        patch.setattr(training_job, "MAX_DISAGREEING_FRACTION", 1.0)
        yield


@pytest.fixture
def no_sockets(monkeypatch):
    """Fails a test that connects or binds a socket; an event loop's own pair of sockets does neither."""

    def refuse(*arguments):
        raise AssertionError(f"a socket was used: {arguments[1:]}")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded tokenizer."""
    from jaxft.rollout.tokenizer import load_tokenizer

    return load_tokenizer()


@pytest.fixture(scope="session")
def make_policy(tokenizer):
    """Makes a policy, always with the same random weights; closes all policies at the end."""
    import jax

    from jaxft.models.config import model_preset
    from jaxft.models.load import init_model
    from jaxft.rollout.policy import Policy

    model, params = init_model(model_preset("qwen3-50k"), jax.random.key(1, impl="threefry2x32"))
    made = []

    def make(**options):
        given = options.pop("params", params)
        # By way of the host: on the device each shape of an array would need a program. Arrays that are committed to
        # their device have programs of their own, so those that are not stay so.
        copied = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding if x.committed else None), given)
        defaults = {"stop_ids": (tokenizer.eos_token_id,), "slots": SLOTS, "max_context_tokens": CONTEXT}
        made.append(Policy(options.pop("model", model), copied, tokenizer, **(defaults | options)))
        return made[-1]

    yield make
    for policy in made:
        policy.close()


@pytest.fixture(scope="session")
def policy(make_policy):
    """A policy that nobody updates, and whose programs are compiled."""
    made = make_policy()
    asyncio.run(made.engine.warm_up())
    return made


@pytest.fixture(scope="session")
def make_scripted_policy(make_policy):
    """Makes a policy that samples a given token at each position, whatever it is asked."""
    import jax

    def make(script):
        params = {"script": jax.device_put(np.asarray(script, np.int32))}
        return make_policy(model=scripted_model(), params=params, max_context_tokens=len(script))

    return make


@cache
def scripted_model():
    import jax
    import jax.numpy as jnp

    from jaxft.models.bridge import from_function

    def network(params, tokens, positions):
        following = jnp.take(params["script"], positions + 1, mode="clip")
        return 100.0 * jax.nn.one_hot(following, 262)

    return from_function(network)


@pytest.fixture(scope="session")
def make_items():
    """Makes examples of a dataset from their names."""

    def make(names):
        return [EvalInputItem(id=name, full_dataset_entry={"name": name}) for name in names]

    return make


@pytest.fixture(scope="session")
def make_call():
    """Makes a call; its log-probabilities and version tell its tokens from those of all other calls by default."""

    def make(
        index, prompt_ids, token_ids, *, logprobs=None, version=None, finish_reason="stop", content=None, **fields
    ):
        if logprobs is None:
            logprobs = [-float(100 * index + place + 1) for place in range(len(token_ids))]
        versions = [index if version is None else version] * len(token_ids)
        completion = Completion(list(token_ids), list(logprobs), list(logprobs), versions, finish_reason)
        told = {name: fields.pop(name) for name in fields.keys() & {"tool_calls", "reasoning_content", "response_text"}}
        content, prompt = f"answer {index}" if content is None else content, Prompt("", tuple(prompt_ids))
        reply = Reply(content, completion, prompt.ids, index, **told)
        known = {"llm": "policy", "messages": ({"role": "user", "content": f"question {index}"},), "prompt": prompt}
        return Call(index, reply=reply, **(known | fields))

    return make


@pytest.fixture(scope="session")
def record_call(make_call):
    """Records a call in the current episode, as a language model would."""

    def record(prompt_ids, token_ids, messages=(), content="said", llm="policy"):
        current = episode()
        index, _ = current.begin_call(tuple(prompt_ids))
        current.record(
            make_call(
                index,
                prompt_ids,
                token_ids,
                logprobs=[-1.0] * len(token_ids),
                version=0,
                content=content,
                llm=llm,
                messages=tuple(messages) or ({"role": "user", "content": "asked"},),
                functions=current_functions(),
            )
        )

    return record


@pytest.fixture(scope="session")
def make_sequence():
    """Makes a row of a two-token prompt and four sampled tokens; rows of other numbers have other tokens."""

    def make(number=0, **changes):
        fields = {
            "tokens": [3, 10 + number, 20, 21 + number, 22, 1],
            "completion_mask": [False, False, True, True, True, True],
            "sampler_logprobs": [0.0, 0.0, -5.0, -5.0, -5.0, -5.0],
            "behavior_logprobs": [0.0, 0.0, -5.0, -5.0, -5.0, -5.0],
            "temperatures": [1.0] * 6,
            "policy_versions": [-1, -1, 0, 0, 0, 0],
        }
        return TokenSequence(**(fields | changes))

    return make


@pytest.fixture(scope="session")
def make_collection(make_sequence):
    """Makes a collection of two examples with two generations of one row each; `changes` has fields by row number."""

    def make(run_id, rewards=(1.0, 0.0, 1.0, 0.0), changes=None, sequences=None):
        trajectories = [
            Trajectory(
                episode=[],
                reward=0.0 if reward is None else reward,
                scorable=reward is not None,
                example_id=f"example-{place // 2}",
                generation=place % 2,
                sequences=[make_sequence(place, **(changes or {}).get(place, {}))] if sequences is None else sequences,
            )
            for place, reward in enumerate(rewards)
        ]
        return TrajectoryCollection(trajectories=[trajectories[:2], trajectories[2:]], run_id=run_id)

    return make

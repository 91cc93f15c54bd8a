import pytest

from jaxft.harness.data_models import EvalInputItem, Trajectory, TrajectoryCollection
from jaxft.policy.recorder import Call, current_functions, episode
from jaxft.policy.sequences import TokenSequence


@pytest.fixture(scope="session")
def make_items():
    """Examples `a`, `b`, ... of a dataset."""

    def make(names):
        return [EvalInputItem(id=name, full_dataset_entry={"name": name}) for name in names]

    return make


@pytest.fixture(scope="session")
def record_call():
    """Records a call in the current episode, as a language model would."""

    def record(prompt_ids, token_ids, messages=(), content="said", llm="policy"):
        current = episode()
        index, _ = current.begin_call(tuple(prompt_ids))
        logprobs = (-1.0,) * len(token_ids)
        current.record(
            Call(
                index=index,
                llm=llm,
                messages=tuple(messages) or ({"role": "user", "content": "asked"},),
                content=content,
                prompt_text="",
                prompt_ids=tuple(prompt_ids),
                token_ids=tuple(token_ids),
                sampler_logprobs=logprobs,
                behavior_logprobs=logprobs,
                temperature=1.0,
                finish_reason="stop",
                policy_version=0,
                functions=current_functions(),
            )
        )

    return record


@pytest.fixture(scope="session")
def make_sequence():
    """A row of a two-token prompt and four sampled tokens, told from others by `number`."""

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
    """A collection of two examples with two generations each, one row each; `changes` go by the place of the row."""

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

import asyncio
import json

import pytest

from jaxft.harness.curriculum import GroupReward, choose_groups, initial_state
from jaxft.harness.data_models import (
    CurriculumLearningConfig,
    FinetuneConfig,
    Trajectory,
    TrajectoryCollection,
)

# Ten examples whose groups of two differ by `diff`, by their mean rewards: a is the easiest. d tells nothing.
MEANS = {"f": 0.4, "a": 0.9, "h": 0.2, "b": 0.8, "j": 0.0, "c": 0.7, "d": 0.6, "i": 0.1, "e": 0.5, "g": 0.3}
TELLING = "abcefghij"


def group(name, mean, diff, **changes):
    rewards = (mean - diff / 2, mean + diff / 2)
    return [
        Trajectory(episode=[], reward=reward, example_id=name, generation=generation, **changes)
        for generation, reward in enumerate(rewards)
    ]


def groups(silent="d"):
    """A collection in the order of the dataset; the groups of `silent` examples have equal rewards."""
    return [group(name, mean, 0.0 if name in silent else 0.2) for name, mean in MEANS.items()]


def names(chosen):
    return "".join(one[0].example_id for one in chosen)


def run(config, epochs, collections=lambda epoch: groups(), state=None, first=0, seed=0):
    """(ids, percentile) of each epoch, and the last state."""
    state, table = initial_state(config) if state is None else state, []
    for epoch in range(first, epochs):
        chosen, state = choose_groups(collections(epoch), config, state, epoch=epoch, seed=seed)
        table.append((names(chosen), state["current_percentile"]))
    return table, state


# Worked by hand: nine groups tell something, and of nine 0.3 is 3, 0.5 is 5, 0.7 is 7 and 0.9 is 9 (rounded up).
EASY_FIRST = (
    [("abc", 0.3)] * 5 + [("abcef", 0.5)] * 5 + [("abcefgh", 0.7)] * 5 + [("abcefghij", 0.9)] * 5
)  # fmt: skip
HARD_FIRST = (
    [("jih", 0.3)] * 5 + [("jihgf", 0.5)] * 5 + [("jihgfec", 0.7)] * 5 + [("jihgfecba", 0.9)] * 5
)  # fmt: skip


@pytest.mark.parametrize("ascending, table", [(False, EASY_FIRST), (True, HARD_FIRST)])
def test_twenty_epochs(ascending, table):
    config = CurriculumLearningConfig(enabled=True, sort_ascending=ascending)
    before = initial_state(config)
    assert (before["total_groups"], before["dropped_groups"], before["last_expansion_epoch"]) == (0, [], -1)
    found, state = run(config, 20)
    assert found == table
    assert state["last_expansion_epoch"] == 15 and state["total_groups"] == 10 and state["dropped_groups"] == ["d"]


def test_epochs_without_signal_count_too():
    config = CurriculumLearningConfig(enabled=True)
    silent = {*range(3, 8), 19}
    found, _ = run(config, 20, lambda epoch: groups(MEANS if epoch in silent else "d"))
    expected = [("" if epoch in silent else ids, share) for epoch, (ids, share) in enumerate(EASY_FIRST)]
    assert found == expected  # the share grew in epoch 5, when nothing was chosen


def test_subsampling_draws_from_what_the_percentile_keeps():
    config = CurriculumLearningConfig(enabled=True, random_subsample=0.4)  # at most ceil(9 x 0.4) = 4 groups
    found, _ = run(config, 20)
    for (ids, share), (kept, wanted_share) in zip(found, EASY_FIRST, strict=True):
        assert share == wanted_share and len(ids) == min(len(kept), 4)
        assert set(ids) <= set(kept) and list(ids) == sorted(ids)
    assert found[:5] == EASY_FIRST[:5]  # three are below the bound already
    assert len({ids for ids, _ in found[5:10]}) > 1  # every epoch draws anew
    assert found == run(config, 20)[0] != run(config, 20, seed=1)[0]


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("restart", [1, 5, 8, 19])
def test_a_restart_goes_on_as_if_nothing_had_happened(restart, ascending):
    config = CurriculumLearningConfig(enabled=True, sort_ascending=ascending, random_subsample=0.4)
    whole, end = run(config, 20)
    before, state = run(config, restart)
    after, resumed = run(config, 20, state=json.loads(json.dumps(state)), first=restart)
    assert before + after == whole and resumed == end


def test_shares_are_exact():
    ten = [group(str(number), number / 10, 0.2) for number in range(10)]
    config = CurriculumLearningConfig(enabled=True)
    chosen, _ = choose_groups(ten, config, initial_state(config), epoch=10, seed=0)
    assert len(chosen) == 7  # in floats 10 (0.3 + 0.2 + 0.2) is more than 7


def test_a_difference_of_exactly_the_least_is_enough():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=1.0)
    pairs = [
        [Trajectory(episode=[], reward=r, example_id=n) for r in rs] for n, rs in (("a", (0.3, 0.2)), ("b", (0, 0.09)))
    ]
    chosen, _ = choose_groups(pairs, config, initial_state(config), epoch=0, seed=0)
    assert names(chosen) == "a"  # 0.3 - 0.2 is less than 0.1 in floats


def test_unscorable_trajectories_say_nothing():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=1.0)
    lone = [*group("a", 0.5, 0.0), Trajectory(episode=[], reward=0.0, scorable=False, example_id="a")]
    chosen, state = choose_groups([lone, group("b", 0.5, 0.2)], config, initial_state(config), epoch=0, seed=0)
    assert names(chosen) == "b" and state["examples"]["a"]["reward_mean"] == 0.5


def test_of_a_single_group_only_the_subsample_is_taken():
    config = CurriculumLearningConfig(enabled=True, random_subsample=0.5)
    single = [Trajectory(episode=[], reward=0.0, example_id="a", generation=n) for n in range(5)]  # nothing to learn
    drawn = {
        tuple(t.generation for t in choose_groups([single], config, initial_state(config), epoch=e, seed=0)[0][0])
        for e in range(20)
    }
    assert all(len(taken) == 3 and list(taken) == sorted(taken) for taken in drawn) and len(drawn) > 1
    whole, _ = choose_groups([single], CurriculumLearningConfig(enabled=True), initial_state(config), epoch=0, seed=0)
    assert len(whole[0]) == 5


def test_groups_without_ids_are_told_apart_by_their_place():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=0.5)
    unnamed = [[Trajectory(episode=[], reward=r) for r in (0.0, mean)] for mean in (0.4, 0.8)]
    _, state = choose_groups(unnamed, config, initial_state(config), epoch=0, seed=0)
    assert state["included_groups"] == ["1"] and state["examples"]["0"]["epochs_included"] == 0


def test_an_example_may_have_several_groups_in_an_epoch():
    config = CurriculumLearningConfig(enabled=True, initial_percentile=1.0)
    given = [group("a", 0.75, 0.5), group("a", 0.25, 0.0), group("b", 0.5, 0.0)]
    chosen, state = choose_groups(given, config, initial_state(config), epoch=0, seed=0)
    assert chosen == given[:1] and state["included_groups"] == ["a"] and state["dropped_groups"] == ["a", "b"]
    assert state["examples"]["a"] == {"reward_mean": 0.5, "reward_diff": 0.5, "epochs_included": 1}
    _, state = choose_groups([given[0], given[0]], config, state, epoch=1, seed=0)
    assert state["included_groups"] == ["a", "a"] and state["examples"]["a"]["epochs_included"] == 2


def test_the_trainer_keeps_the_state(make_trainer):
    def trainer():
        made = make_trainer()
        curriculum = {"enabled": True, "random_subsample": 0.4}
        asyncio.run(made.initialize(FinetuneConfig(curriculum_learning=curriculum, seed=3)))
        return made

    def choose(made, epoch):
        return names(
            made.apply_curriculum_learning(TrajectoryCollection(trajectories=groups(), run_id="r"), epoch).trajectories
        )

    first = trainer()
    assert first.get_curriculum_state()["current_percentile"] == 0.3
    ids = [choose(first, epoch) for epoch in range(20)]
    second = trainer()
    assert [choose(second, epoch) for epoch in range(8)] == ids[:8]
    third = trainer()
    third.restore_curriculum_state(json.loads(json.dumps(second.get_curriculum_state())))
    assert [choose(third, epoch) for epoch in range(8, 20)] == ids[8:]
    assert third.get_curriculum_state() == first.get_curriculum_state()
    first.get_curriculum_state()["examples"].clear()
    assert first.get_curriculum_state()["examples"]  # what is given is a copy


def test_the_adapter_says_what_the_rewards_are(make_trainer, monkeypatch):
    made = make_trainer()
    # As the adapter weighs them, the rewards of d to g differ.
    weighed = [GroupReward(mean, 0.2 if name in "defg" else 0.0) for name, mean in MEANS.items()]
    monkeypatch.setattr(made.trainer_adapter, "group_rewards", lambda collection: weighed)
    curriculum = {"enabled": True, "initial_percentile": 0.5}
    asyncio.run(made.initialize(FinetuneConfig(curriculum_learning=curriculum)))
    chosen = made.apply_curriculum_learning(TrajectoryCollection(trajectories=groups(), run_id="r"), 0)
    assert names(chosen.trajectories) == "de"
    state = made.get_curriculum_state()
    assert sorted(state["dropped_groups"]) == list("abchij") and state["examples"]["d"]["reward_diff"] == 0.2

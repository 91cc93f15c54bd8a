"""Curriculum learning: selection of the groups that an epoch trains.

Groups with nearly equal rewards are dropped. The others are sorted by mean reward, and a fraction of them, which grows
with the epochs, is trained. Rewards are as the trainer adapter weighs them. The selection depends on rewards, epoch and
seed only; the state is a record of it.
"""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from jaxft.harness.data_models import CurriculumLearningConfig, Trajectory

State = dict[str, Any]
"""State of the curriculum.

The keys are `current_percentile`; `last_expansion_epoch`, -1 before the first; for the latest epoch `total_groups`
and the example ids of `included_groups` (trained) and `dropped_groups` (rewards differ too little); and `examples`,
which maps an id to the last `reward_mean` and `reward_diff`, and to `epochs_included`.
"""


class GroupReward(NamedTuple):
    """Mean of the rewards of a group, and the difference of the largest and the smallest; both 0 without a reward."""

    mean: float
    diff: float


class _Group(NamedTuple):
    id: str
    trajectories: list[Trajectory]
    mean: float
    diff: float


def initial_state(config: CurriculumLearningConfig) -> State:
    """Return the state before the first epoch."""
    return {
        "current_percentile": percentile(config, 0),
        "last_expansion_epoch": -1,
        "total_groups": 0,
        "included_groups": set(),  # a trainer with a curriculum of its own may expect a set, as in the toolkit
        "dropped_groups": [],
        "examples": {},
    }


def percentile(config: CurriculumLearningConfig, epoch: int) -> float:
    """Return the fraction of groups that an epoch (from 0) trains; it grows after every `expansion_interval` epochs.

    >>> [percentile(CurriculumLearningConfig(), epoch) for epoch in (0, 4, 5, 10, 15, 19, 20)]
    [0.3, 0.3, 0.5, 0.7, 0.9, 0.9, 1.0]
    """
    return float(_percentile(config, epoch))


def choose_groups(
    groups: Sequence[Sequence[Trajectory]],
    config: CurriculumLearningConfig,
    state: State,
    *,
    epoch: int,
    seed: int,
    rewards: Sequence[GroupReward] | None = None,
    num_groups: int | None = None,
) -> tuple[list[list[Trajectory]], State]:
    """Return the groups that an epoch trains, in the order of the curriculum, and the state after the epoch.

    A group whose largest and smallest reward differ by less than `min_reward_diff` is dropped. Of the remaining n, the
    first `max(1, ceil(n percentile))` by mean reward are kept (ties in the given order), and at most
    `ceil(n random_subsample)` of these are drawn at random. The single group of an epoch is neither dropped nor cut;
    instead `ceil(n random_subsample)` of its n trajectories are drawn. Each task has a draw of its own.

    Args:
        groups: trajectories of one example each.
        config: the section `finetuning.curriculum_learning`.
        state: the state after the previous epoch; it is not modified.
        epoch: number of the epoch, from 0.
        seed: seed of the run.
        rewards: mean and difference of each group; None: those of the trajectories that are scorable.
        num_groups: groups of the epoch, those of other tasks included; None: these are all.
    """
    share = _percentile(config, epoch)
    task = next((trajectory.task for group in groups for trajectory in group), None)
    draw = random.Random(f"curriculum {seed} {epoch}" + (f" {task}" if task is not None else ""))
    rewards = [group_reward(group) for group in groups] if rewards is None else rewards
    known = [
        _Group(str(place) if group[0].example_id is None else group[0].example_id, list(group), *rewards[place])
        for place, group in enumerate(groups)
        if group
    ]
    if len(known) == 1 == (num_groups or 1):
        telling, chosen = known, [known[0]._replace(trajectories=_drawn_trajectories(known[0], config, draw))]
    else:
        telling = [group for group in known if _differ(group.diff, config.min_reward_diff)]
        ordered = sorted(telling, key=lambda group: group.mean, reverse=not config.sort_ascending)
        chosen = ordered[: max(1, math.ceil(len(telling) * share))]
        if config.random_subsample is not None:
            most = math.ceil(len(telling) * Fraction(str(config.random_subsample)))
            if most < len(chosen):
                chosen = [chosen[place] for place in sorted(draw.sample(range(len(chosen)), most))]
    included, kept = {group.id for group in chosen}, {id(group) for group in telling}
    examples, groups_of = dict(state["examples"]), defaultdict[str, list[_Group]](list)
    for group in known:  # an example may have several: one that was carried over, and a new one
        groups_of[group.id].append(group)
    for name, own in groups_of.items():
        before = examples.get(name, {}).get("epochs_included", 0)
        examples[name] = {
            "reward_mean": sum(group.mean for group in own) / len(own),
            "reward_diff": max(group.diff for group in own),
            "epochs_included": before + (name in included),
        }
    return [group.trajectories for group in chosen], {
        "current_percentile": float(share),
        "last_expansion_epoch": _last_expansion(config, epoch),
        "total_groups": len(known),
        "included_groups": [group.id for group in chosen],
        "dropped_groups": [group.id for group in known if id(group) not in kept],
        "examples": examples,
    }


def choose_groups_per_task(
    groups: Sequence[Sequence[Trajectory]],
    configs: Mapping[str | None, CurriculumLearningConfig],
    state: State,
    *,
    epoch: int,
    seed: int,
    rewards: Sequence[GroupReward],
) -> tuple[list[list[Trajectory]], State]:
    """Return `choose_groups` of each task's groups by themselves, one task after the other, and the state of all.

    Args:
        groups: trajectories of one example each.
        configs: the curriculum by task; that of None is for tasks without one of their own. All groups of a task whose
            curriculum is not enabled are chosen.
        state: the state after the previous epoch; it is not modified.
        epoch: number of the epoch, from 0.
        seed: seed of the run.
        rewards: mean and difference of each group.
    """
    everything = CurriculumLearningConfig(initial_percentile=1.0, min_reward_diff=0.0)
    of_group = [group[0].task if group else None for group in groups]
    chosen, states, trained = list[list[Trajectory]](), list[State](), Fraction(0)
    choose = partial(choose_groups, epoch=epoch, seed=seed, num_groups=sum(map(bool, groups)))
    for task in dict.fromkeys(of_group) or (None,):
        config = configs.get(task, configs[None])
        config = config if config.enabled else everything
        places = [place for place, other in enumerate(of_group) if other == task]
        parts = [groups[place] for place in places], config, state
        more, state = choose(*parts, rewards=[rewards[place] for place in places])
        chosen, states, trained = chosen + more, [*states, state], trained + _percentile(config, epoch) * len(places)
    joined = {name: [each for own in states for each in own[name]] for name in ("included_groups", "dropped_groups")}
    share = float(trained / len(groups)) if groups else state["current_percentile"]
    total = sum(own["total_groups"] for own in states)
    return chosen, state | joined | {"total_groups": total, "current_percentile": share}


def _percentile(config: CurriculumLearningConfig, epoch: int) -> Fraction:
    # Exact fractions: in floats 0.3 + 2 * 0.2 is slightly above 0.7, and the ceiling of ten times that is 8.
    expansions = epoch // config.expansion_interval
    return min(
        Fraction(1), Fraction(str(config.initial_percentile)) + expansions * Fraction(str(config.increment_percentile))
    )


def _last_expansion(config: CurriculumLearningConfig, epoch: int) -> int:
    """Return the latest epoch, this one included, in which the fraction grew; -1 if there is none."""
    starts = range(config.expansion_interval, epoch + 1, config.expansion_interval)
    return next((start for start in reversed(starts) if percentile(config, start - 1) < percentile(config, start)), -1)


def group_reward(group: Sequence[Trajectory]) -> GroupReward:
    """Return mean and difference of the rewards of the scorable trajectories of a group."""
    rewards = [trajectory.reward for trajectory in group if trajectory.scorable] or [0.0]
    return GroupReward(sum(rewards) / len(rewards), max(rewards) - min(rewards))


def _differ(diff: float, least: float) -> bool:
    # Rewards of 0.3 and 0.2 must differ by 0.1, although floats round the difference.
    return diff >= least or math.isclose(diff, least, rel_tol=1e-9)


def _drawn_trajectories(group: _Group, config: CurriculumLearningConfig, draw: random.Random) -> list[Trajectory]:
    if config.random_subsample is None:
        return group.trajectories
    count = math.ceil(len(group.trajectories) * Fraction(str(config.random_subsample)))
    return [group.trajectories[place] for place in sorted(draw.sample(range(len(group.trajectories)), count))]

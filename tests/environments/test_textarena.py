"""Games of textarena are played by language models that say what a script holds."""

import asyncio
import random
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from jaxft.environments import TextArenaDatasetConfig, TextArenaWorkflowConfig
from jaxft.environments.textarena import dataset, in_place_of_global, workflow
from jaxft.errors import ComponentError, ConfigError
from jaxft.rollout.calls import Completion, Reply


class Speaker:
    """A language model that says what it was given, and keeps what it was asked."""

    def __init__(self, *said):
        self.said, self.asked = list(said), []

    async def chat(self, messages, *, max_tokens):
        random.random()  # others draw from the global numbers, too
        self.asked.append([message["content"] for message in messages if message["role"] == "user"])
        return Reply(self.said.pop(0), Completion(finish_reason="stop"))


def builder(agent=None, **llms):
    async def get_llm(name):
        return llms[name]

    return SimpleNamespace(get_llm=get_llm, config=SimpleNamespace(workflow=agent))


def load(agent=None, **options):
    return asyncio.run(anext(dataset(TextArenaDatasetConfig(**options), builder(agent))))


def play(row, opponent=None, **llms):
    async def main():
        config = TextArenaWorkflowConfig(llm="policy", opponent=opponent)
        return await (await anext(workflow(config, builder(**llms))))(row)

    return asyncio.run(main())


def test_the_global_random_numbers_are_as_before():
    random.seed(5)
    before, own = random.getstate(), random.Random(1)
    with in_place_of_global(own):
        drawn = [random.random()]
    with in_place_of_global(own):
        drawn.append(random.random())
    assert random.getstate() == before
    again = random.Random(1)
    assert drawn == [again.random(), again.random()]


def test_the_policy_does_not_play_against_itself():
    with pytest.raises(ValidationError, match=r"opponent\n.*'policy'.*snapshot_of: policy"):
        TextArenaWorkflowConfig(llm="policy", opponent="policy")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ComponentError, match=r"jaxft\[envs\]"):
        load(game="GuessTheNumber-v0")


@pytest.mark.envs
def test_a_game_is_one_conversation_and_depends_on_its_seed_alone():
    items = load(game="GuessTheNumber-v0", size=3, seed=11, options={"max_number": 8})
    assert [item.id for item in items] == [f"GuessTheNumber-v0-{seed}" for seed in (11, 12, 13)]
    played = []
    for seed in (0, 1):
        random.seed(seed)  # of somebody else's numbers
        llm = Speaker(*[f"[{number}]" for number in range(1, 9)])
        played.append(play(items[0].full_dataset_entry, policy=llm))
    assert played[0] == played[1] and played[0]["reward"] == 1.0
    first, *others = llm.asked[-1]
    assert "between 1 and 8" in first and others[0].endswith("The target number is higher.")
    assert all("[1]" not in text for text in others), "its own moves are not told again"


@pytest.mark.envs
def test_a_game_that_is_lost_has_the_reward_of_the_game():
    (item,) = load(game="GuessTheNumber-v0", size=1)
    played = play(item.full_dataset_entry, policy=Speaker("I do not know", "no idea"))
    assert played["reward"] == 0.0 and played["report"]["invalid_move"]


@pytest.mark.envs
@pytest.mark.parametrize("seed", [0, 1])
def test_an_opponent_plays_the_other_side(seed):
    agent = TextArenaWorkflowConfig(llm="policy", opponent="other")
    (item,) = load(agent, game="TicTacToe-v0", size=1, seed=seed)
    winner, loser = Speaker("[0]", "[1]", "[2]"), Speaker("[3]", "[4]", "[8]")
    played = play(item.full_dataset_entry, opponent="other", policy=winner, other=loser)
    assert played["reward"] == 1 and len(loser.asked) == 2 + seed
    assert f"Player {1 - seed}]" in winner.asked[-1][-1]
    lost = play(
        item.full_dataset_entry,
        opponent="other",
        policy=Speaker("[3]", "[4]", "[8]"),
        other=Speaker("[0]", "[1]", "[2]"),
    )
    assert lost["reward"] == -1


@pytest.mark.envs
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"game": "GuesTheNumber-v0"}, "'GuessTheNumber-v0'"),
        ({"game": "GuessTheNumber-v0", "options": {"max_nmber": 8}}, "max_nmber"),
        ({"game": "UsedCar-v0-balanced"}, r"UsedCar-v0-balanced.*No module"),
        ({"game": "Debate-v0-long"}, r"Debate-v0-long.*OpenRouter"),
        ({"game": "TicTacToe-v0"}, r"1 players .*opponent.*has to be 2"),
    ],
)
def test_a_game_that_cannot_begin_is_refused_at_once(options, told):
    with pytest.raises(ConfigError, match=told):
        load(**options)


@pytest.mark.envs
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 reads the module of the game")
def test_a_game_that_this_python_cannot_read_is_refused():
    with pytest.raises(ConfigError, match=r"IteratedStagHunt-v0.*SyntaxError"):
        load(game="IteratedStagHunt-v0")


@pytest.mark.envs
def test_missing_words_are_told_in_one_line(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *names, **options: False)
    with pytest.raises(ConfigError, match=r"Hangman-v0.*nltk\.downloader words"):
        load(game="Hangman-v0")

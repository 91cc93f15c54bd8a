"""Games of TextArena: a dataset of seeds, and the workflow that plays a game as one conversation.

The policy reads what is new since its last move, and its answer is the move, in the form that wrappers of the game's id
give it. Games draw from Python's global random numbers, so each has a state of its own, which takes their place while
the game computes.
"""

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from jaxft import ConfigError, EvalInputItem
from jaxft.environments import TextArenaDatasetConfig, TextArenaWorkflowConfig, installed
from jaxft.errors import did_you_mean, one_line

NO_DATA = "its words are missing; python -m nltk.downloader words averaged_perceptron_tagger_eng gets them"
"""Told in the place of nltk's LookupError, whose message is a page."""

ASKS_OTHERS = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")
"""Games that ask models at OpenRouter, at an address and a cost of their own, and hold up all other episodes."""


async def dataset(config: TextArenaDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield a game for each seed."""
    players = 2 if isinstance(agent := builder.config.workflow, TextArenaWorkflowConfig) and agent.opponent else 1
    rows = [
        {"game": config.game, "options": config.options, "seed": config.seed + number} for number in range(config.size)
    ]
    start_game(rows[0], players, random.Random(0))
    yield [EvalInputItem(id=f"{row['game']}-{row['seed']}", full_dataset_entry=row) for row in rows]


async def workflow(config: TextArenaWorkflowConfig, builder: Any) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Yield the workflow: a game from its first move to its end. It returns messages, reward and the game's report.

    In a game of two the policy moves first if the seed is even.
    """
    llms = [await builder.get_llm(name) for name in (config.llm, config.opponent) if name is not None]

    async def play(row: dict[str, Any]) -> dict[str, Any]:
        chances, seat = random.Random(row["seed"]), row["seed"] % len(llms)
        game = start_game(row, len(llms), chances)
        talks: list[list[dict[str, Any]]] = [[] for _ in llms]
        is_over = False
        while not is_over:
            player = game.state.current_player_id
            talks[player].append({"role": "user", "content": news(game.state, player)})
            reply = await llms[player ^ seat].chat(talks[player], max_tokens=config.max_tokens)
            talks[player].append(reply.message)
            with in_place_of_global(chances):
                is_over, _ = game.step(reply.content)
        rewards, report = game.close()
        return {"messages": talks[seat], "reward": rewards[seat], "report": report[seat]}

    yield play


def start_game(row: dict[str, Any], players: int, chances: random.Random) -> Any:
    """Return the game of a row at its beginning.

    Raises:
        ConfigError: there is no such game, it cannot be imported, it asks models of its own, it refuses its options or
            the number of players, or its data are missing.
    """
    textarena, name = installed("textarena"), row["game"]
    known = textarena.envs.registration.ENV_REGISTRY
    if name not in known:
        raise ConfigError(f"textarena: there is no game '{name}'{did_you_mean(name, known, what='there are')}")
    if name.partition("-")[0] in ASKS_OTHERS:
        raise ConfigError(f"textarena: '{name}' asks models at OpenRouter itself, and is not offered")
    try:
        with in_place_of_global(chances):
            game = textarena.make(name, **row["options"])
            game.reset(num_players=players, seed=row["seed"])
        return game
    except Exception as error:  # another package's code, some of which this Python cannot read
        told = NO_DATA if type(error) is LookupError else one_line(error)
        with_what = f"{players} players (two with workflow.opponent) and options {row['options']}"
        raise ConfigError(f"textarena: '{name}' cannot begin with {with_what}: {told}") from error


def news(state: Any, player: int) -> str:
    """Return what happened since the player's last move, each with its speaker, as textarena writes it."""
    told = [(speaker, text) for speaker, text, _ in state.get_current_player_observation() if speaker != player]
    return "\n".join(f"[{state.role_mapping.get(speaker, speaker)}] {text}" for speaker, text in told)


@contextlib.contextmanager
def in_place_of_global(chances: random.Random) -> Iterator[None]:
    """Let Python's global random numbers be those of `chances`."""
    outside = random.getstate()
    random.setstate(chances.getstate())
    try:
        yield
    finally:
        chances.setstate(random.getstate())
        random.setstate(outside)

"""An agent learns tic-tac-toe until it never loses, not even to a perfect opponent, whoever begins.

    python experiments/perfect_opponent.py

The agent's marks are X. Each message shows it the eight lines of the board, and not the moves before. Seven of ten
games are against a perfect opponent, the others against a random one; the agent is not told. They start after some
moves of a random player, so that all positions are met and the games of a group tell which move is good. The reward is
the outcome; groups whose games end alike, soon most, are left out of updates. A search plays, and teaches nothing.

From random weights: in a supervised warm start the agent imitates luck. From each of 10,000 positions a random player
has sixteen games against the perfect opponent, and the moves of those that ended best are kept. GRPO goes on from
there. Of 1,000 greedy games as either player the agent then loses none to the perfect opponent, which draws among its
best moves, and as the first it wins more than 0.95 against a random one. 21 minutes on one CPU core.

    python experiments/perfect_opponent.py --set eval.general.dataset.perfect=0 --overwrite   # random opponents only
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field
from tic_tac_toe import DRAW, ILLEGAL, LINES, LOSS, WIN, Board, shares
from warm_start import warm_start

import jaxft

SCORES = {WIN: 1, DRAW: 0, LOSS: -1}
OTHER = {"X": "O", "O": "X"}


class PlayerConfig(jaxft.WorkflowConfig, name="tic_tac_toe_player"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that plays X.")


@jaxft.register_workflow(config_type=PlayerConfig)
async def tic_tac_toe_player(config: PlayerConfig, builder: Any) -> AsyncIterator[Any]:
    """One game from a position in which X is to move, with the outcome for X as its output."""
    llm = await builder.get_llm(config.llm)

    async def play(example: dict[str, Any]) -> str:
        board, draw = Board(), jaxft.episode().random
        board.cells = list(example["position"])
        while True:
            reply = await llm.chat([{"role": "user", "content": lines_of(board)}], temperature=1.0, max_tokens=4)
            if reply.content not in map(str, board.free()):
                return ILLEGAL
            outcome = play_turn(board, int(reply.content), draw, is_perfect=example["is_perfect"])
            if outcome is not None:
                return outcome

    yield play


class PositionsConfig(jaxft.DatasetConfig, name="positions"):
    """Positions to play from."""

    count: int = Field(default=8192, ge=1, description="Number of positions.")
    moves: int = Field(default=7, ge=1, le=7, description="Most random moves before the agent's first.")
    perfect: float = Field(default=0.7, ge=0, le=1, description="Fraction of the games with a perfect opponent.")


@jaxft.register_dataset_loader(config_type=PositionsConfig)
async def positions(config: PositionsConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The positions of training."""
    draw = random.Random(0)
    is_perfect = [draw.random() < config.perfect for _ in range(config.count)]
    starts = [random_position(draw, draw.randint(0, config.moves), is_perfect=each) for each in is_perfect]
    yield games("train", starts, is_perfect)


def games(name: str, starts: list[str], is_perfect: list[bool]) -> list[jaxft.EvalInputItem]:
    """Games from the positions against the opponents, with ids that begin with `name`."""
    entries = [{"position": start, "is_perfect": each} for start, each in zip(starts, is_perfect, strict=True)]
    return [jaxft.EvalInputItem(id=f"{name}-{i}", full_dataset_entry=entry) for i, entry in enumerate(entries)]


def play_turn(board: Board, cell: int, draw: random.Random, *, is_perfect: bool) -> str | None:
    """Place X and, if the game goes on, the opponent's O; return the outcome of a game that has ended."""
    board.place(cell, "X")
    if board.has_won("X"):
        return WIN
    if board.free():
        board.place(opponents_move(board, draw, is_perfect=is_perfect), "O")
    if board.has_won("O"):
        return LOSS
    return None if board.free() else DRAW


def lines_of(board: Board) -> str:
    """The eight lines of a board, as the agent sees them.

    >>> lines_of(Board())
    '123 456 789 147 258 369 159 357'
    """
    return " ".join("".join(board.cells[cell] for cell in line) for line in LINES)


def random_position(draw: random.Random, moves: int, *, is_perfect: bool = False) -> str:
    """The cells after so many moves, the last of them by O, of a game of a random X that nobody has won."""
    while True:
        board = Board()
        for left in range(moves, 0, -1):
            cell = opponents_move(board, draw, is_perfect=is_perfect) if left % 2 else draw.choice(board.free())
            board.place(cell, "O" if left % 2 else "X")
        if not board.has_won("X") and not board.has_won("O"):
            return "".join(board.cells)


def opponents_move(board: Board, draw: random.Random, *, is_perfect: bool) -> int:
    return draw.choice(best_moves("".join(board.cells), "O") if is_perfect else board.free())


@cache
def value(cells: str, player: str) -> int:
    """Return how a position ends between perfect players: 1 if `player`, who is to move, wins, 0 drawn, -1 lost."""
    if any(all(cells[cell] == OTHER[player] for cell in line) for line in LINES):
        return -1
    return max(values(cells, player).values(), default=0)


def values(cells: str, player: str) -> dict[str, int]:
    """Return how the game ends between perfect players after each move of `player`, by its cell."""
    return {cell: -value(cells.replace(cell, player), OTHER[player]) for cell in cells if cell.isdigit()}


def best_moves(cells: str, player: str) -> list[int]:
    """All moves of `player` of the highest value."""
    found = values(cells, player)
    return [int(cell) for cell, each in found.items() if each == max(found.values())]


def best_of_sixteen(draw: random.Random, start: str) -> list[list[dict[str, str]]]:
    """The moves of a random player in its best of sixteen games from a position; none if all games end alike."""
    played = [random_game(draw, start) for _ in range(16)]
    worst, best = min(score for score, _ in played), max(score for score, _ in played)
    return [move for score, moves in played if worst < score == best for move in moves]


def random_game(draw: random.Random, start: str) -> tuple[int, list[list[dict[str, str]]]]:
    """A random player against the perfect opponent: the score, and each move as a conversation."""
    board, moves, outcome = Board(), [], None
    board.cells = list(start)
    while outcome is None:
        cell = draw.choice(board.free())
        moves.append([{"role": "user", "content": lines_of(board)}, {"role": "assistant", "content": str(cell)}])
        outcome = play_turn(board, cell, draw, is_perfect=True)
    return SCORES[outcome], moves


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, training, games against both opponents."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        if not session.is_resumed:
            await imitate_luck(session, arguments.warm_start_steps)
            session.notes["before"] = await played(session, "before", arguments.eval_games)
        await session.train()
        await session.export_model()
        session.write_result(session.notes["before"] | await played(session, "after", arguments.eval_games))


async def imitate_luck(session: jaxft.Session, steps: int) -> None:
    """Runs the supervised warm start; 0 steps run none."""
    if steps:
        llm = await session.builder.get_llm(session.config.workflow.llm)
        draw = random.Random(session.config.finetuning.seed)
        starts = [random_position(draw, draw.randint(0, 7), is_perfect=i % 2 == 0) for i in range(10000)]
        moves = [move for start in starts for move in best_of_sixteen(draw, start)]
        await warm_start(session, llm, moves, steps=steps, batch_rows=64, learning_rate=3e-3)


async def played(session: jaxft.Session, when: str, count: int) -> dict[str, float]:
    """Print the outcomes of whole greedy games against both opponents, and return shares of wins and losses."""
    found = {}
    for opponent in ("perfect", "random"):
        for order in ("first", "second"):
            draw = random.Random("held-out")
            starts = [random_position(draw, int(order == "second")) for _ in range(count)]
            held_out = games(f"held-out-{order}-{opponent}", starts, [opponent == "perfect"] * count)
            output = await session.evaluate(held_out)
            outcomes = Counter(item.output_obj for item in output.eval_input.eval_input_items)
            session.console.message(f"{when} training, {order} against a {opponent} opponent: {shares(outcomes)}")
            found[f"wins_{order}_{opponent}_{when}"] = outcomes[WIN] / count
            found[f"losses_{order}_{opponent}_{when}"] = (outcomes[LOSS] + outcomes[ILLEGAL]) / count
    return found


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument("--warm-start-steps", type=int, default=4000, help="supervised steps (default %(default)s)")
    parser.add_argument("--eval-games", type=int, default=1000, help="games of each kind (default %(default)s)")
    sys.exit(jaxft.run_script(main, parser))

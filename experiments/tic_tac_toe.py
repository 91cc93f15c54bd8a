"""An agent learns tic-tac-toe: it plays X against an opponent that moves at random, one chat message per move.

    python experiments/tic_tac_toe.py

It starts from random weights: a short supervised warm start on random games teaches the rules, then GRPO on the outcome
of its own games teaches it to win. A KL to the warm-started policy keeps it trying all legal moves. About four minutes
on two CPU cores. At the end the greedy policy wins at least 0.90 of 1,000 held-out games and loses at most 0.07 (a
random player wins 0.58).

    python experiments/tic_tac_toe.py --set finetuning.seed=1 --overwrite
    python experiments/tic_tac_toe.py --list experiments/tic_tac_toe_sweep.yml --seeds 10,11   # what it was tuned with
    python experiments/tic_tac_toe.py --set llms.policy.path=PATH_TO_A_CHECKPOINT --warm-start-steps 0
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pydantic import Field

import jaxft

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
WIN, DRAW, LOSS, ILLEGAL = "win", "draw", "loss", "illegal"


class Board:
    """Nine cells, numbered from 1; a free one shows its number.

    >>> board = Board()
    >>> board.place(5, "X")
    >>> print(board)
    123
    4X6
    789
    """

    def __init__(self) -> None:
        self.cells = list("123456789")

    def __str__(self) -> str:
        return "\n".join("".join(self.cells[row : row + 3]) for row in (0, 3, 6))

    def free(self) -> list[int]:
        return [int(cell) for cell in self.cells if cell.isdigit()]

    def place(self, cell: int, player: str) -> None:
        self.cells[cell - 1] = player

    def has_won(self, player: str) -> bool:
        return any(all(self.cells[cell] == player for cell in line) for line in LINES)


class TicTacToeConfig(jaxft.WorkflowConfig, name="tic_tac_toe"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that plays X.")
    max_tokens: int = Field(default=4, ge=1, description="Most tokens of an answer; a cell and the stop token suffice.")


@jaxft.register_workflow(config_type=TicTacToeConfig)
async def tic_tac_toe(config: TicTacToeConfig, builder: Any) -> AsyncIterator[Any]:
    """One game, with the outcome for X as its output."""
    llm = await builder.get_llm(config.llm)

    async def play(example: dict[str, Any]) -> str:
        board, opponent, messages = Board(), jaxft.episode().random, []
        while True:
            messages.append({"role": "user", "content": str(board)})
            reply = await llm.chat(messages, temperature=1.0, max_tokens=config.max_tokens)
            messages.append({"role": "assistant", "content": reply.content})
            if reply.content not in map(str, board.free()):
                return ILLEGAL
            board.place(int(reply.content), "X")
            if board.has_won("X"):
                return WIN
            if not board.free():
                return DRAW
            board.place(opponent.choice(board.free()), "O")
            if board.has_won("O"):
                return LOSS

    yield play


class GameOutcomeConfig(jaxft.EvaluatorConfig, name="game_outcome"):
    """Reward of each outcome."""

    win: float = Field(default=1.0, description="Reward of a won game.")
    draw: float = Field(default=0.0, description="Reward of a draw.")
    loss: float = Field(default=-1.0, description="Reward of a lost game.")
    illegal: float = Field(default=-1.0, description="Reward of a game that ended by an illegal or unreadable move.")


@jaxft.register_evaluator(config_type=GameOutcomeConfig)
async def game_outcome(config: GameOutcomeConfig, builder: Any) -> AsyncIterator[Any]:
    """The reward of the outcome that the workflow returned."""
    rewards = {WIN: config.win, DRAW: config.draw, LOSS: config.loss, ILLEGAL: config.illegal}
    yield lambda item: rewards[item.output_obj]


class GamesConfig(jaxft.DatasetConfig, name="tic_tac_toe_games"):
    """A number of games; the moves of the opponent depend on the id of the game."""

    count: int = Field(default=16, ge=1, description="Number of games, each played num_generations times an epoch.")


@jaxft.register_dataset_loader(config_type=GamesConfig)
async def tic_tac_toe_games(config: GamesConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The training games."""
    yield games("train", config.count)


def games(name: str, count: int) -> list[jaxft.EvalInputItem]:
    """`count` examples, with ids that begin with `name`."""
    return [jaxft.EvalInputItem(id=f"{name}-{i}", full_dataset_entry={"game": i}) for i in range(count)]


def random_conversation(draw: random.Random) -> list[dict[str, str]]:
    """A game of two random players as the agent of X would have seen it.

    Three in four games that X wins are left out: the warm start teaches the rules, and GRPO teaches how to win.
    """
    board, messages = Board(), []
    while True:
        cell = draw.choice(board.free())
        messages += [{"role": "user", "content": str(board)}, {"role": "assistant", "content": str(cell)}]
        board.place(cell, "X")
        if board.has_won("X") and draw.random() < 0.75:
            board, messages = Board(), []
            continue
        if board.has_won("X") or not board.free():
            return messages
        board.place(draw.choice(board.free()), "O")
        if board.has_won("O"):
            return messages


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, evaluation, training, evaluation."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        if not session.is_resumed:
            await learn_the_rules(session, arguments.warm_start_steps)
            session.notes["before"] = await held_out_outcomes(session, arguments.eval_games)
            session.console.message(f"before training: {shares(session.notes['before'])}")
        before = Counter(session.notes["before"])
        await session.train()
        after = await held_out_outcomes(session, arguments.eval_games)
        session.console.message(f"after training: {shares(after)}")
        await session.export_model()
        session.write_result(
            {
                "win_rate_before": before[WIN] / before.total(),
                "win_rate_after": after[WIN] / after.total(),
                "loss_rate_after": (after[LOSS] + after[ILLEGAL]) / after.total(),
                "draw_rate_after": after[DRAW] / after.total(),
            }
        )


async def learn_the_rules(session: jaxft.Session, steps: int) -> None:
    """Runs the supervised warm start; 0 steps run none."""
    from warm_start import warm_start

    llm = await session.builder.get_llm(session.config.workflow.llm)
    if steps:
        draw = random.Random(session.config.finetuning.seed)
        conversations = [random_conversation(draw) for _ in range(4000)]
        await warm_start(session, llm, conversations, steps=steps, batch_rows=32, learning_rate=2e-3)


async def held_out_outcomes(session: jaxft.Session, count: int) -> Counter[str]:
    """Outcomes of greedy games against opponents that training never met."""
    output = await session.evaluate(games("held-out", count))
    return Counter(item.output_obj for item in output.eval_input.eval_input_items)


def shares(outcomes: Counter[str]) -> str:
    """Outcomes as fractions, in one line."""
    return "  ".join(f"{name} {outcomes[name] / outcomes.total():.3f}" for name in (WIN, DRAW, LOSS, ILLEGAL))


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument(
        "--warm-start-steps", type=int, default=500, help="supervised steps first (default %(default)s)"
    )
    parser.add_argument("--eval-games", type=int, default=1000, help="held-out games (default %(default)s)")
    sys.exit(jaxft.run_script(main, parser))

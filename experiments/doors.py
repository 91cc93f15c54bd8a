"""An agent tries keys and remembers which one opened: a walk through a house of locked doors, 20 turns long.

    python experiments/doors.py

One of ten keys (a to j) opens all doors of a house, another one in each house. A turn tries a key: `+` says that the
door has opened and that the next one is reached, `-` that it is still shut; which keys were tried stands in the earlier
messages only. The return is the number of doors opened. The script prints the best possible return, that of the best
player without memory, who sees the last message alone, and that of a random one.

From random weights: a supervised warm start on games of a careless player leaves a policy whose likeliest answer is the
next key of the ring, whatever has opened before. From there GRPO learns to remember, from a reward for every turn that
opens a door. With `workflow.credit=outcome` only the whole game has a reward. Four to six minutes on one core; the
greedy policy has 0.81 or more of the best possible return at the end.

    python experiments/doors.py --set workflow.credit=outcome --overwrite
"""

import argparse
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

import jaxft

KEYS, TURNS = "abcdefghij", 20
OPEN, SHUT = "+", "-"


class DoorsConfig(jaxft.WorkflowConfig, name="doors"):
    """The agent."""

    llm: jaxft.LLMRef = Field(description="Entry of llms that plays.")
    credit: Literal["turn", "outcome"] = Field(default="turn", description="Reward each turn, or the game alone.")


@jaxft.register_workflow(config_type=DoorsConfig)
async def doors(config: DoorsConfig, builder: Any) -> AsyncIterator[Any]:
    """One game, with the number of doors opened as its output. An answer that is no key ends it."""
    llm = await builder.get_llm(config.llm)

    async def play(example: dict[str, Any]) -> int:
        right, opened = random.Random(example["house"]).choice(KEYS), 0
        messages = [{"role": "user", "content": SHUT}]
        for _ in range(TURNS):
            reply = await llm.chat(messages, temperature=1.0, max_tokens=2)
            if len(reply.content) != 1 or reply.content not in KEYS:
                break
            has_opened = reply.content == right
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": OPEN if has_opened else SHUT})
            opened += has_opened
            if config.credit == "turn":
                jaxft.episode().reward_step(float(has_opened))
        return opened

    yield play


class OpenedConfig(jaxft.EvaluatorConfig, name="opened"):
    """Reward of a game: the number of doors opened."""


@jaxft.register_evaluator(config_type=OpenedConfig)
async def opened(config: OpenedConfig, builder: Any) -> AsyncIterator[Any]:
    """The output of the workflow is the reward."""
    yield lambda item: float(item.output_obj)


class HousesConfig(jaxft.DatasetConfig, name="houses"):
    """Houses to play in."""

    count: int = Field(default=4096, ge=1, description="Number of houses.")


@jaxft.register_dataset_loader(config_type=HousesConfig)
async def houses(config: HousesConfig, builder: Any) -> AsyncIterator[list[jaxft.EvalInputItem]]:
    """The houses of training."""
    yield examples("train", config.count)


def examples(name: str, count: int) -> list[jaxft.EvalInputItem]:
    """`count` houses whose ids begin with `name`; other names are other houses."""
    ids = [f"{name}-{i}" for i in range(count)]
    return [jaxft.EvalInputItem(id=each, full_dataset_entry={"house": each}) for each in ids]


def careless_conversation(draw: random.Random) -> list[dict[str, str]]:
    """A game of a careless player: the next key of the ring, or any, or sometimes the one that has opened."""
    right, key, has_opened = draw.choice(KEYS), draw.choice(KEYS), False
    messages = [{"role": "user", "content": SHUT}]
    for _ in range(TURNS):
        following = KEYS[(KEYS.index(key) + 1) % len(KEYS)]
        choices = (following, draw.choice(KEYS), right if has_opened else following)
        key = draw.choices(choices, weights=(0.45, 0.25, 0.3))[0]
        has_opened = has_opened or key == right
        messages.append({"role": "assistant", "content": key})
        messages.append({"role": "user", "content": OPEN if key == right else SHUT})
    return messages[:-1]


def best_return() -> float:
    """Expected return of the best player: it tries each key once, and goes on with the one that opens."""
    return sum(TURNS - tried for tried in range(len(KEYS))) / len(KEYS)


def return_without_memory(logits: jax.Array) -> jax.Array:
    """Expected return of a player whose next key depends on the last message alone; `logits` is [2 keys]."""
    after_shut, after_open = jax.nn.softmax(logits)  # chances to try the right key, for each key that may be right
    opened, total = jnp.zeros(len(KEYS)), jnp.zeros(len(KEYS))
    for _ in range(TURNS):
        opened = opened * after_open + (1 - opened) * after_shut
        total += opened
    return total.mean()


def best_return_without_memory(starts: int = 64, steps: int = 500) -> float:
    """The highest of these returns that gradient ascent finds from so many random starts."""
    logits = 3 * jax.random.normal(jax.random.key(0), (starts, 2, len(KEYS)))
    optimizer, returns = optax.adam(0.1), jax.vmap(return_without_memory)

    def step(_: Any, carry: Any) -> Any:
        logits, state = carry
        changes, state = optimizer.update(jax.grad(lambda logits: -returns(logits).sum())(logits), state)
        return optax.apply_updates(logits, changes), state

    logits, _ = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, step, carry))((logits, optimizer.init(logits)))
    return float(returns(logits).max())


async def main(config: jaxft.Config, arguments: argparse.Namespace) -> None:
    """Warm start, evaluation, training, evaluation."""
    async with jaxft.open_session(config, overwrite=arguments.overwrite, resume=arguments.resume) as session:
        best = best_return()
        bounds = {"without_memory": best_return_without_memory() / best, "random": TURNS / len(KEYS) / best}
        shown = f"without memory at most {bounds['without_memory']:.3f} of it, at random {bounds['random']:.3f}"
        session.console.message(f"best possible return {best:.2f}; {shown}")
        if not session.is_resumed:
            await learn_to_try(session, arguments.warm_start_steps)
            session.notes["before"] = await held_out_return(session, arguments.eval_games) / best
            session.console.message(f"before training: {session.notes['before']:.3f} of the best possible return")
        await session.train()
        after = await held_out_return(session, arguments.eval_games) / best
        session.console.message(f"after training: {after:.3f} of the best possible return")
        await session.export_model()
        session.write_result({"before": session.notes["before"], "after": after, **bounds})


async def learn_to_try(session: jaxft.Session, steps: int) -> None:
    """Runs the supervised warm start; 0 steps run none."""
    from warm_start import warm_start

    llm = await session.builder.get_llm(session.config.workflow.llm)
    if steps:
        draw = random.Random(session.config.finetuning.seed)
        conversations = [careless_conversation(draw) for _ in range(2000)]
        await warm_start(session, llm, conversations, steps=steps, batch_rows=32, learning_rate=5e-3)


async def held_out_return(session: jaxft.Session, count: int) -> float:
    """Mean return of greedy games in houses that training never saw."""
    output = await session.evaluate(examples("held-out", count))
    return sum(item.output_obj for item in output.eval_input.eval_input_items) / count


if __name__ == "__main__":
    parser = jaxft.run_arguments(__doc__, Path(__file__).with_suffix(".yml"))
    parser.add_argument(
        "--warm-start-steps", type=int, default=400, help="supervised steps first (default %(default)s)"
    )
    parser.add_argument("--eval-games", type=int, default=400, help="held-out games (default %(default)s)")
    sys.exit(jaxft.run_script(main, parser))

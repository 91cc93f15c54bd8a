"""Make what the example starts from: a small policy that knows the form of a conversation, and the two datasets.

    python examples/nat/make_policy.py

The policy starts from random weights and imitates careless conversations, in which lookups and operation are drawn at
random: each lookup is of the first name two times in three, the operation is the question's two times in three. Less
than 0.3 of its answers are right. One minute on two CPU cores.
"""

import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxft_nat_example.questions import HELD_OUT, OPERATIONS, TRAINING, question, table

import jaxft

STEPS, BATCH_ROWS = 2000, 32

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Look up a fact.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def careless_conversation(number: int, draw: random.Random) -> list[dict[str, Any]]:
    """A conversation of the right form about a table."""
    asked, facts = question(number)[0], table(number)
    _, operation, first, second = asked.split()
    names = [draw.choice((first, first, second)) for _ in range(2)]
    if draw.random() < 1 / 3:
        operation = draw.choice([name for name in OPERATIONS if name != operation])
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
    for index, name in enumerate(names):
        call = {"id": f"call_{index}", "type": "function", "function": {"name": "get", "arguments": {"key": name}}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "content": str(facts[name]), "tool_call_id": call["id"]})
    values = [facts[name] for name in names]
    return [*messages, {"role": "assistant", "content": str(OPERATIONS[operation](*values))}]


def main(folder: Path = Path("runs")) -> None:
    """Write the datasets and the policy."""
    if (folder / "nat_policy").exists():
        raise SystemExit(f"{folder / 'nat_policy'} is there already: remove it to make another")
    folder.mkdir(exist_ok=True)
    for name, numbers in (("train", TRAINING), ("held_out", HELD_OUT)):
        rows = [dict(zip(("id", "question", "answer"), (number, *question(number)), strict=True)) for number in numbers]
        (folder / f"nat_{name}.json").write_text(json.dumps(rows, indent=1))

    tokenizer = jaxft.load_tokenizer()
    model, params = jaxft.init_model(jaxft.model_preset("qwen3-50k"), jax.random.key(0))
    policy = jaxft.Policy(model, params, tokenizer, stop_ids=(tokenizer.eos_token_id,), slots=1, max_context_tokens=128)
    draw = random.Random(0)
    rows = [
        policy.template.conversation(careless_conversation(number, draw), [TOOL])
        for number in TRAINING
        for _ in range(3)
    ]
    width = max(len(ids) for ids, _ in rows)
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, (ids, trained) in enumerate(rows):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, trained

    optimizer = optax.adam(optax.linear_schedule(5e-3, 5e-4, STEPS), b2=0.95)
    update = jaxft.make_update(model, jaxft.sft_loss, optimizer, max_grad_norm=1.0)
    state = jaxft.init_train_state(jax.tree.map(jnp.copy, params), optimizer, model)
    for step in range(STEPS):
        chosen = draw.sample(range(len(rows)), BATCH_ROWS)
        state, metrics = update(state, jaxft.Batch(jnp.asarray(tokens[chosen]), jnp.asarray(mask[chosen])))
        if step % 200 == 199:
            print(f"step {step + 1}/{STEPS}  loss {float(metrics['loss']):.3f}", flush=True)

    policy.close()
    jaxft.save_model(folder / "nat_policy", model, state.params, tokenizer=tokenizer)
    print(f"written to {folder}/nat_policy, {folder}/nat_train.json, {folder}/nat_held_out.json")


if __name__ == "__main__":
    main()

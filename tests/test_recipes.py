"""The recipes of experiments/real: configurations, rewards, instructions that a program checks, the template."""

import asyncio
import importlib
from pathlib import Path

import jinja2
import pytest

import jaxft

FOLDER = Path(__file__).parents[1] / "experiments" / "real"
OWN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of SmolLM2-135M-Instruct."""
QUESTION, SYSTEM = {"role": "user", "content": "a\n b "}, {"role": "system", "content": " s"}
CALL = {"id": "0", "type": "function", "function": {"name": "price", "arguments": {"item": "lamp"}}}


@pytest.fixture(autouse=True)
def _beside_the_recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def rewards(module, evaluator, config, output, **row):
    """Return the rewards that an evaluator of a recipe gives to an output for a row."""
    recipe = importlib.import_module(module)
    score = asyncio.run(anext(getattr(recipe, evaluator)(getattr(recipe, config)(), None)))
    expected = row.pop("expected", None)
    item = jaxft.EvalInputItem(
        id="0", input_obj="", output_obj=output, expected_output_obj=expected, full_dataset_entry=row
    )
    return score(item)


def render(template, messages, **variables):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)  # as transformers has it
    return environment.from_string(template).render(messages=messages, **variables)


@pytest.mark.parametrize("file", sorted({*FOLDER.glob("*.yml")} - {FOLDER / "smollm2.yml"}), ids=lambda file: file.stem)
def test_the_configuration_is_good(file):
    assert jaxft.load_config(file).finetuning.enabled


@pytest.mark.parametrize(
    ("answer", "exact", "form"),
    [
        ("12", 1.0, 0.0),
        (" 12\n", 1.0, 0.0),
        ("13", 0.0, 0.0),
        ("12.", 0.0, -0.248),
        ("", 0.0, -1.0),
        ("a" * 60, 0.0, -1.0),
    ],
)
def test_a_bare_number_is_rewarded_and_words_cost(answer, exact, form):
    found = rewards("agents", "bare_number", "BareNumberConfig", answer, expected="12")
    assert found == pytest.approx({"exact": exact, "form": form})


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"So \boxed{1,250}.", 1.0),
        (r"\boxed{3} or \boxed{$1250.00}", 1.0),
        (r"\boxed{1250} or \boxed{3}", 0.0),
        ("1250", 0.0),
    ],
)
def test_the_last_number_in_a_box_counts(text, reward):
    found = rewards("gsm8k", "boxed_number", "BoxedNumberConfig", text, expected="50 * 25 = <<50*25=1250>>\n#### 1,250")
    assert found == reward


@pytest.mark.parametrize(
    ("asked", "answer", "reward"),
    [(["red lamp"], "It costs 41.", 1.3), (["red lamp"], "It costs 14.", 0.3), (["lamp"], "41", 0.1), ([], "41", 0.0)],
)
def test_an_answer_counts_if_its_price_was_looked_up(asked, answer, reward):
    output = {"asked": asked, "answer": answer}
    found = rewards("shop", "served", "ServedConfig", output, item="red lamp", price="41")
    assert sum(found.values()) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("instruction", "good", "bad"),
    [
        ("Use at most five words.", "A long, wide, slow stream", "It is a very slow stream"),
        ("Use at most ten words.", "one two three four five six seven eight nine ten", "1 2 3 4 5 6 7 8 9 10 11"),
        ("Use exactly three words.", "Bread is good.", "Bread"),
        ("Use capital letters only.", "SNOW, 3 DAYS!", "SNOW, three days"),
        ("Use small letters only.", "snow", "Snow"),
        ("End with an exclamation mark.", "Snow!", "Snow! Ice."),
        ("Put the whole answer in double quotes.", '"Snow."', '"Snow" and ice'),
        ("Use the word 'old'.", "An OLD one.", "A bold one"),
        ("Use the word 'people'.", "For people.", "Peoples"),
        ("Begin with the word 'Well'.", "Well, yes.", "Oh, well"),
        ("Do not use the word 'the'.", "Other things", "All the things"),
    ],
)  # fmt: skip
def test_a_program_checks_each_instruction(instruction, good, bad):
    constraints = importlib.import_module("constraints")
    assert constraints.CHECKS[instruction](good) and not constraints.CHECKS[instruction](bad)


@pytest.mark.parametrize(
    ("answer", "followed", "nearly"),
    [
        ("SNOW IS COLD", 1.0, 0.0),
        ("Snow is cold", 0.5, 0.0),
        ("SNOW", 0.5, 0.0),
        ("1 2 3", 0.0, 0.0),
        ("a b c D E F", 0.0, 0.125),
    ],
)
def test_instructions_that_are_followed_are_rewarded_and_a_text_that_is_nearly_short(answer, followed, nearly):
    asked = {"instructions": ["Use exactly three words.", "Use capital letters only."]}
    found = rewards("constraints", "instructions_followed", "InstructionsFollowedConfig", answer, **asked)
    assert found == {"followed": followed, "nearly": nearly}


@pytest.mark.parametrize(
    ("module", "load", "config"),
    [("shop", "shop", "ShopConfig"), ("constraints", "constrained_questions", "ConstrainedQuestionsConfig")],
)
def test_held_out_questions_are_of_things_that_training_has_not(module, load, config):
    recipe = importlib.import_module(module)
    configs = [getattr(recipe, config)(split=split, count=300) for split in ("train", "held_out")]
    train, held_out = (
        {item.input_obj for item in asyncio.run(anext(getattr(recipe, load)(each, None)))} for each in configs
    )
    assert train.isdisjoint(held_out) and len(train) > 100 and len(held_out) > 50


@pytest.mark.parametrize(
    "messages", [[QUESTION], [SYSTEM, QUESTION, {"role": "assistant", "content": "x\n"}, QUESTION]]
)
@pytest.mark.parametrize("generates", [True, False])
def test_without_tools_the_template_writes_what_the_models_own_writes(messages, generates):
    ours = (FOLDER / "tools.jinja").read_text()
    assert render(ours, messages, add_generation_prompt=generates) == render(
        OWN_TEMPLATE, messages, add_generation_prompt=generates
    )


@pytest.mark.parametrize("arguments", [{"item": "lamp"}, '{"item": "lamp"}'])
def test_with_tools_it_writes_them_their_calls_and_results(arguments):
    call = CALL | {"function": {"name": "price", "arguments": arguments}}
    messages = [
        SYSTEM,
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "41"},
    ]
    text = render((FOLDER / "tools.jinja").read_text(), messages, tools=[{"function": {"name": "price"}}])
    assert text == (
        '<|im_start|>system\n s\n{"name": "price"}<|im_end|>\n<|im_start|>user\na\n b <|im_end|>\n'
        '<|im_start|>assistant\n<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n41<|im_end|>\n"
    )

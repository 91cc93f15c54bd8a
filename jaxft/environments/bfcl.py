"""The Berkeley Function Calling Leaderboard, version 4: its questions of a single turn, and the checker of bfcl-eval.

bfcl-eval pins packages that exclude JAX, and is not installed: questions are read from its wheel. So are the modules of
its checker, which import none of those packages.
"""

import copy
import importlib
import json
import sys
import types
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from jaxft import ComponentError, ConfigError, DatasetError, EvalInputItem, EvalOutputItem
from jaxft.environments import BFCLDatasetConfig, BFCLScoreConfig, BFCLWorkflowConfig
from jaxft.environments.factory import check_tools
from jaxft.errors import one_line

WANTED = "wanted is the wheel of bfcl-eval (pip download --no-deps bfcl-eval), or a folder that holds bfcl_eval"

CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple"]
CATEGORIES += ["live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"]

TYPES = {"dict": "object", "tuple": "array", "float": "number", "any": "string"}
"""JSON schema's names of types that have another one in a function."""


async def dataset(config: BFCLDatasetConfig, builder: Any) -> AsyncIterator[list[EvalInputItem]]:
    """Yield the questions of all categories."""
    yield [item for category in config.categories for item in questions(config.path, category)]


async def workflow(config: BFCLWorkflowConfig, builder: Any) -> AsyncIterator[Callable[[dict[str, Any]], Any]]:
    """Yield the workflow: one answer to a question, of which it returns the calls."""
    llm = await builder.get_llm(config.llm)
    await check_tools(llm)

    async def ask(row: dict[str, Any]) -> list[dict[str, str]]:
        reply = await llm.chat(row["question"][0], tools=row["tools"], max_tokens=config.max_tokens)
        return [{call.name: call.arguments} for call in reply.tool_calls]

    yield ask


async def score(config: BFCLScoreConfig, builder: Any) -> AsyncIterator[Callable[[EvalInputItem], EvalOutputItem]]:
    """Yield the evaluator, which gives 1 to calls that bfcl-eval's checker accepts."""
    checker = load_checker(config.path)

    def judge(item: EvalInputItem) -> EvalOutputItem:
        verdict = check(checker, item.full_dataset_entry, item.output_obj)
        return EvalOutputItem(id=item.id, score=float(verdict["valid"]), reasoning=verdict)

    yield judge


def questions(path: Path, category: str) -> list[EvalInputItem]:
    """Return the questions of a category, from a wheel or folder.

    Raises:
        ConfigError: the category has several turns, other languages, or no checker without a model; or there is none.
        DatasetError: they cannot be read.
    """
    if category not in CATEGORIES:
        told = f"category '{category}' is not offered, only those of one turn: {', '.join(CATEGORIES)}"
        raise ConfigError(f"bfcl: {told}")
    try:
        data, file = (zipfile.Path(path) if path.is_file() else path) / "bfcl_eval" / "data", f"BFCL_v4_{category}.json"
        has_answers, items = "relevance" not in category, []
        answered = read_rows(data / "possible_answer" / file) if has_answers else []
        answers = {row["id"]: row["ground_truth"] for row in answered}
        for row in read_rows(data / file):
            tools = [as_tool(function) for function in row["function"]]
            row |= {"category": category, "tools": tools, "ground_truth": answers[row["id"]] if has_answers else None}
            items.append(EvalInputItem(id=row["id"], input_obj=row["question"], full_dataset_entry=row))
        return items
    except (OSError, zipfile.BadZipFile, LookupError, TypeError, ValueError) as error:
        raise DatasetError(f"bfcl: {category} cannot be read from {path}: {one_line(error)}; {WANTED}") from error


def read_rows(file: Any) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, which may be in a wheel."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def as_tool(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function in OpenAI's format, as bfcl-eval offers it to models that call functions.

    >>> given = {"type": "dict", "properties": {"x": {"type": "float", "description": "A number."}}, "required": ["x"]}
    >>> tool = as_tool({"name": "math.sqrt", "description": "Root.", "parameters": given})["function"]
    >>> tool["name"], tool["parameters"]["properties"]["x"]["type"]
    ('math_sqrt', 'number')
    """
    tool = copy.deepcopy(function)
    tool["name"] = tool["name"].replace(".", "_")
    tool["description"] += " Note that the provided function is in Python 3 syntax."
    cast_types({"properties": {"parameters": tool["parameters"]}})
    return {"type": "function", "function": tool}


def cast_types(value: dict[str, Any]) -> None:
    """Give what is in a parameter the types of JSON schema."""
    for each in value.get("properties", {}).values():
        if each.get("type") == "float":
            each |= {"format": "float", "description": each["description"] + " This is a float type value."}
    for each in (*value.get("properties", {}).values(), *([value["items"]] if "items" in value else [])):
        each["type"] = TYPES.get(given := each.get("type", "any"), given)
        cast_types(each)


def load_checker(path: Path) -> Any:
    """Return the module `ast_checker` of a wheel or folder of bfcl-eval, which only the caller then holds.

    Raises:
        ComponentError: it cannot be imported.
    """
    # The checker asks this module whether names lost their points; the real one imports clients of all models.
    models = types.ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {"jaxft": types.SimpleNamespace(underscore_to_dot=True)}  # type: ignore[attr-defined]
    package = types.ModuleType("bfcl_eval")
    package.__path__ = [str(path / package.__name__)]
    sys.modules.update({module.__name__: module for module in (package, models)})
    try:
        return importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    except ImportError as error:
        raise ComponentError(f"bfcl: the checker cannot be imported from {path}: {error}; {WANTED}") from error
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package.__name__]:
            del sys.modules[name]  # another path may hold another version


def check(checker: Any, row: dict[str, Any], calls: list[dict[str, str]]) -> dict[str, Any]:
    """Return the checker's verdict on the calls of an answer: `valid`, and an error if it is not.

    Calls whose arguments are no object of JSON count as none, as in bfcl-eval.
    """
    category = row["category"]
    try:
        made = [{name: json.loads(arguments)} for call in calls for name, arguments in call.items()]
    except ValueError:
        made = []
    if not all(isinstance(arguments, dict) for call in made for arguments in call.values()):
        made = []
    if "relevance" in category:
        return {"valid": bool(made) == (category == "live_relevance")}
    given = row["function"], made, row["ground_truth"], checker.Language.PYTHON
    return dict(checker.ast_checker(*given, category, "jaxft"))

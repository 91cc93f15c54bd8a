"""Changes jaxft by one sign at a time, and runs the tests that reach the change: which changes does no test notice?

    pytest --cov=jaxft --cov-context=test --cov-report=      # once, with workers: which test reaches which line
    python scripts/mutate.py run --tests default             # minutes; stopped, it goes on where it was
    python scripts/mutate.py run --tests slow --survivors    # those that the default tests did not notice
    python scripts/mutate.py draw --count 60 --seed 0        # another list

`scripts/mutations.json` holds the list: module, line, the line before and after. A mutation is made in a copy of the
checkout, where the test files with a test that reaches its line run until the first failure, for at most three minutes.
They run whole, as a program that one test has traced is not traced again by the next. Results stay in `--results`.
"""

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIST = ROOT / "scripts" / "mutations.json"
SHARES = {"core": 13, "training": 7, "rollout": 10, "harness": 11, "serving": 6, "models": 8, "runs": 5}
"""Mutations of each room, of sixty."""
SECONDS = 180
SWAPPED = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"},
    **{ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"},
    **{ast.And: "or", ast.Or: "and"},
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
DEFAULT = {"default": [], "slow": ["-m", "slow and not gpu"]}


def mutations(path: Path) -> list[dict[str, Any]]:
    """Return every change of one sign, name or constant that leaves a line of a module that line, changed."""
    source = path.read_text()
    lines = source.splitlines()
    found = []

    def between(left: ast.expr, right: ast.expr, sign: str) -> None:
        if left.end_lineno == right.lineno:
            change(left.end_lineno, left.end_col_offset, right.col_offset, sign)

    def change(number: int, start: int, end: int, sign: str) -> None:
        line = lines[number - 1].encode()
        inner = line[start:end].decode()
        if inner.strip(" ()") and inner.isascii():  # brackets between operands stay
            after = line[:start] + inner.replace(inner.strip(" ()"), sign).encode() + line[end:]
            found.append({"line": number, "before": lines[number - 1].strip(), "after": after.decode().strip()})

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            between(node.left, node.comparators[0], SWAPPED[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            between(node.left, node.right, SWAPPED[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            between(node.values[0], node.values[1], SWAPPED[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            change(node.lineno, node.col_offset, node.operand.col_offset, "bool")
        elif isinstance(node, ast.Call) and (name := _name(node.func)) in NAMES:
            end = node.func.end_col_offset
            change(node.func.end_lineno, end - len(name), end, NAMES[name])
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            if value != node.value:  # 1e300 + 1 is 1e300
                change(node.lineno, node.col_offset, node.end_col_offset, repr(value))
    return [{"module": str(path.relative_to(ROOT)), **each} for each in found if _compiles(source, each)]


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _compiles(source: str, change: dict[str, Any]) -> bool:
    try:
        ast.parse(changed(source, change))
    except SyntaxError:
        return False
    return change["before"] != change["after"]


def changed(source: str, change: dict[str, Any]) -> str:
    """Return the source with the change made, at the line nearest to its number that reads as it did before."""
    lines = source.splitlines()
    alike = [number for number, line in enumerate(lines, 1) if line.strip() == change["before"]]
    if not alike:
        raise ValueError(f"{change}: no such line any more: draw the list anew")
    number = min(alike, key=lambda number: abs(number - change["line"]))
    lines[number - 1] = lines[number - 1].replace(change["before"], change["after"])
    return "\n".join(lines) + "\n"


def draw(count: int, seed: int) -> None:
    """Write a list of mutations, drawn from each room by its share, at most one of a line."""
    rng = random.Random(seed)
    drawn = []
    for room, share in SHARES.items():
        files = sorted((ROOT / "jaxft" / room).rglob("*.py"))
        candidates = [each for file in files for each in mutations(file)]
        rng.shuffle(candidates)
        of_each_line = {(each["module"], each["line"]): each for each in candidates}
        wanted = round(count * share / sum(SHARES.values()))
        drawn += [of_each_line[line] for line in rng.sample(sorted(of_each_line), wanted)]
    LIST.write_text(json.dumps(drawn, indent=1) + "\n")
    print(f"{len(drawn)} mutations in {LIST}")


def reaching(data: Any, checkout: Path, mutation: dict[str, Any]) -> list[str]:
    """Return the test files with a test that reaches the mutation's line, most reaching tests first.

    A line that runs at import, such as a default, counts as reached by the tests of its function, or else of its
    module; a module that runs in other processes only counts as reached by the test files of its room.
    """
    source = (checkout / mutation["module"]).read_text()
    before, after = source.splitlines(), changed(source, mutation).splitlines()
    (line,) = (n for n, (old, new) in enumerate(zip(before, after, strict=True), 1) if old != new)
    measured = [file for file in data.measured_files() if file.endswith("/" + mutation["module"])]
    by_line = data.contexts_by_lineno(measured[0]) if measured else {}
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in around]
    spans = sorted((span for span in spans if line in span), key=len)
    for lines in ([line], *spans, by_line):
        files = Counter(name.split("::")[0] for each in lines for name in by_line.get(each, []) if name)
        if files:
            return [file for file, _ in files.most_common()]
    room = checkout / "tests" / Path(mutation["module"]).parts[1]
    return sorted(str(file.relative_to(checkout)) for file in room.glob("test_*.py"))


def run(options: argparse.Namespace) -> None:
    """Run the tests of every mutation that has no result yet, and show how many were noticed."""
    from coverage import CoverageData  # comes with pytest-cov, which only this needs

    data = CoverageData(options.coverage)
    data.read()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "jaxft"
        subprocess.run(["git", "clone", "--quiet", options.checkout, copy], check=True)
        for index, mutation in enumerate(json.loads(LIST.read_text())):
            known = results.setdefault(str(index), {})
            is_noticed = any(result.startswith("noticed") for result in known.values())
            if options.tests in known or (options.survivors and is_noticed) or index % options.of != options.part:
                continue
            known[options.tests] = _try(copy, mutation, reaching(data, copy, mutation), DEFAULT[options.tests])
            print(f"{index:>3} {mutation['module']}:{mutation['line']} {known[options.tests]}", flush=True)
            options.results.write_text(json.dumps(results, indent=1))
    print(Counter(result.split(" ")[0] for known in results.values() for result in known.values()))


def _try(copy: Path, mutation: dict[str, Any], files: list[str], selection: list[str]) -> str:
    """Return `noticed by TEST`, `noticed: no end in time`, `unnoticed`, or `unreached`."""
    if not files:
        return "unreached"
    module = copy / mutation["module"]
    source = module.read_text()
    module.write_text(changed(source, mutation))
    # What a test compiles is no property of what it returns.
    options = ["-x", "-q", "-n", "0", "--no-header", "-p", "no:tests.budget"]
    command = [sys.executable, "-m", "pytest", *options, *selection, *files]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONUNBUFFERED": ""},  # a mutation may leave lines in buffers
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"unfinished: no failure in {SECONDS} seconds of {len(files)} files"
    finally:
        module.write_text(source)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        f"noticed by {failed[0].split(' ')[1]}" if failed else "unnoticed" if done.returncode in (0, 5) else "noticed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("draw", help="write another list of mutations")
    drawing.add_argument("--count", type=int, default=60)
    drawing.add_argument("--seed", type=int, default=0)
    running = verbs.add_parser("run", help="run the tests that reach each mutation")
    running.add_argument("--tests", choices=DEFAULT, default="default")
    running.add_argument("--survivors", action="store_true", help="only mutations that no tests have noticed so far")
    running.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="the file that pytest --cov leaves")
    running.add_argument("--results", type=Path, default=ROOT / "build" / "mutations.json")
    running.add_argument("--checkout", type=Path, default=ROOT, help="a repository whose last commit is tried")
    running.add_argument("--part", type=int, default=0, help="of --of parts that run beside each other")
    running.add_argument("--of", type=int, default=1)
    options = parser.parse_args()
    if options.verb == "draw":
        draw(options.count, options.seed)
    else:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        run(options)


if __name__ == "__main__":
    main()

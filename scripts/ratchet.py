"""Compares the size of jaxft with `scripts/ratchet.json`, and fails if anything has grown or shrunk.

    python scripts/ratchet.py            # what `.ci/run lint` runs
    python scripts/ratchet.py --write    # takes today's numbers over

`inner_code_lines` leaves out the outbuildings; `public_names` counts what `__init__.pyi` files and namespaces export.
A number rises only in a commit that changes the file and says in its message what was gained, or what left for it.
`programs` and `processes` are the most that the default tests may compile and start; `tests/budget.py` counts them.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "scripts" / "ratchet.json"
COUNTED_BY_TESTS = ("programs", "processes")
CONFIG_ROOT = "ConfigModel"
NAMESPACES = ("losses", "advantages", "packing", "sampling", "episodes")
OUTBUILDINGS = ("serving", "report", "planning", "nat", "environments", "tinker")
"""Packages that the inner house does not import."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Return the number of lines that are neither blank nor only comment or docstring.

    >>> code_lines('\"\"\"A docstring.\"\"\"\\n\\n# a comment\\nx = (\\n    1\\n)  # three lines\\n')
    3
    """
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def config_classes(trees: list[ast.Module]) -> Iterator[ast.ClassDef]:
    """Yield the classes that a run's configuration consists of: those that derive from `ConfigModel`, by name."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def derives(name: str) -> bool:
        # A base is a name, or that of a module: `jaxft.WorkflowConfig`.
        bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name].bases] if name in classes else []
        return CONFIG_ROOT in bases or any(map(derives, bases))

    return (node for name, node in classes.items() if derives(name))


def imports_in_functions(tree: ast.Module) -> int:
    """Return the number of import statements inside of functions.

    >>> imports_in_functions(ast.parse("import a\\ndef f():\\n    import b\\n    def g():\\n        import c"))
    2
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {node for function in functions for node in ast.walk(function)}
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in found)


def measure(package: Path) -> dict[str, int]:
    """Return today's numbers of a package, without importing it."""
    files = sorted(package.rglob("*.py"))
    sources = [file.read_text() for file in files]
    lines = dict(zip(files, map(code_lines, sources), strict=True))
    outside = [package / name for name in OUTBUILDINGS]
    trees = [ast.parse(source) for source in sources]
    stubs = [*package.rglob("__init__.pyi"), *(package / f"{name}.py" for name in NAMESPACES)]
    public = [node for stub in stubs for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.alias)]
    return {
        "files": len(files),
        "code_lines": sum(lines.values()),
        "inner_code_lines": sum(lines[file] for file in files if not any(map(file.is_relative_to, outside))),
        "configuration_fields": sum(
            isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.annotation).startswith("ClassVar")
            for node in config_classes(trees)
            for statement in node.body
        ),
        "public_names": len(public),
        "imports_in_functions": sum(map(imports_in_functions, trees)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write today's numbers")
    should_write = parser.parse_args().write
    written, today = json.loads(FILE.read_text()), measure(ROOT / "jaxft")
    changed = {name: number for name, number in today.items() if number != written.get(name)}
    for name, number in (written | today).items():
        print(f"{name:<22} {number:>7,}" + (f"  was {written.get(name, 0):,}" if name in changed else ""))
    if should_write:
        FILE.write_text(json.dumps(written | today, indent=2) + "\n")
    elif changed:
        print("python scripts/ratchet.py --write takes them over; a number that rises needs its reason in the commit")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks that each extra of jaxft can be installed, and that the extras of a group can be installed together.

    pip install uv packaging
    python scripts/check_extras.py            # compares with the table in docs/installation.md
    python scripts/check_extras.py --write    # writes the table

uv resolves each extra for each Python: it reads metadata of packages and installs nothing. A resolver that finds no
newest versions takes older ones, which nobody tested. So extras count as going together only if no package that an
extra names becomes older than in the oldest of them alone.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "installation.md"
BEGIN, END = "<!-- written by scripts/check_extras.py -->", "<!-- end -->"

PYTHONS = ("3.11", "3.12", "3.13")
TABLE_PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_31"  # the oldest that libtpu has wheels for

PURPOSES = {
    "cuda": "NVIDIA GPUs, with CUDA 13",
    "tpu": "TPUs",
    "parquet": "data in Parquet files",
    "gguf": "models in GGUF files",
    "huggingface": "data sets of the Hugging Face hub",
    "completion": "options of `jaxft` completed by the shell",
    "wandb": "logs of runs at Weights & Biases, or in its files offline",
    "envs": "environments of verifiers, tasks of reasoning-gym, games of textarena",
    "tau2": "domains of tau2",
    "openai": "agents that use openai's client, models on a server",
    "serve": "`jaxft serve`, agents at an address",
    "constrained": "answers of a JSON schema, regex or grammar",
    "langchain": "agents of LangChain",
    "pydantic-ai": "agents of pydantic-ai",
    "openai-agents": "agents of openai-agents",
    "nat": "`nat finetune` of NeMo Agent Toolkit",
    "tinker": "scripts for Tinker, trained on this machine",
    "fabric": "Deep Agents, mini-SWE-agent and remote agents, run by NeMo Fabric",
    "llama-index": "agents of LlamaIndex",
    "test": "the tests of a checkout",
    "docs": "the documentation as a site",
    "dev": "work on jaxft: tests, linters, type checker",
}
"""Use of each extra, in the order of the table."""

APART = (
    ({"pydantic-ai", "openai-agents"}, {"envs", "llama-index"}),  # those need openai 3, these openai 2
    ({"fabric"}, {"nat"}),  # mini-SWE-agent and the toolkit need different versions of fsspec
)
"""Pairs of sets: extras of the one do not go with those of the other."""


class Resolution(NamedTuple):
    """Packages that pip would install: their versions, their MB to download, and those that have no wheel."""

    versions: dict[str, Version]
    megabytes: dict[str, float]
    built: list[str]


@cache
def resolve(extras: frozenset[str], python: str) -> Resolution:
    """Return what installing jaxft with these extras brings.

    Raises:
        LookupError: no versions fit; the message is uv's.
    """
    options = [option for extra in sorted(extras) for option in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--output-file", str(lock)]
        command += ["--python-version", python, "--python-platform", PLATFORM, *options, "pyproject.toml"]
        # uv else downloads an interpreter of that version, which it only needs to build packages.
        environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        packages = tomllib.loads(lock.read_text())["packages"]
    return Resolution(
        versions={each["name"]: Version(each["version"]) for each in packages},
        megabytes={each["name"]: _bytes(each) / 1e6 for each in packages},
        built=[each["name"] for each in packages if "wheels" not in each],
    )


def _bytes(package: Mapping) -> int:
    """Return the size of the largest fitting wheel, as the others are those without compiled code."""
    return max((wheel["size"] for wheel in package.get("wheels", ())), default=package.get("sdist", {}).get("size", 0))


def declared_extras() -> dict[str, list[Requirement]]:
    """Return the requirements of each extra in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {name: [Requirement(text) for text in needs] for name, needs in extras.items()}


def named_packages(extra: str) -> list[str]:
    """Return the packages that an extra names, those of extras that it includes among them."""
    names: list[str] = []
    for need in declared_extras()[extra]:
        if need.name == "jaxft":
            names += [name for each in sorted(need.extras) for name in named_packages(each)]
        else:
            names.append(canonicalize_name(need.name))
    return list(dict.fromkeys(names))


def groups() -> list[frozenset[str]]:
    """Return the largest sets of extras that are meant to go together."""
    users = frozenset(PURPOSES) - {"test", "dev", "docs"}
    return [users - frozenset().union(*left_out) for left_out in product(*APART)]


def older_packages(extras: frozenset[str], python: str) -> list[str]:
    """Return the named packages that are older with these extras together than in the oldest of them alone."""
    together = resolve(extras, python).versions
    alone = [resolve(frozenset({extra}), python).versions for extra in sorted(extras)]
    found = []
    for name in dict.fromkeys(name for extra in sorted(extras) for name in named_packages(extra)):
        oldest = min(versions[name] for versions in alone if name in versions)
        if together[name] < oldest:
            found.append(f"{name} {together[name]} instead of {oldest}")
    return found


def faults_of(python: str) -> list[str]:
    """Return what does not hold for a version of Python: extras that cannot be installed, alone or in their group."""
    faults = []
    for extras in [*map(frozenset, zip(PURPOSES, strict=True)), *groups()]:
        name = f"Python {python}, {','.join(sorted(extras))}"
        try:
            older = older_packages(extras, python)
        except LookupError as error:
            older = [str(error)]
        print(f"{name}: {'; '.join(older) or 'fits'}", flush=True)
        faults += [f"{name}: {each}" for each in older]
    for pair in [frozenset(pair) for ones, others in APART for pair in product(sorted(ones), sorted(others))]:
        name = f"Python {python}, {','.join(sorted(pair))}"
        try:
            older = older_packages(pair, python)
        except LookupError:
            older = ["does not fit"]
        print(f"{name}: {'; '.join(older) or 'fits'}", flush=True)
        if not older:
            faults.append(f"{name}: go together now: take them out of APART, and out of docs/installation.md")
    return faults


def table() -> str:
    """Return the table of extras as it stands in docs/installation.md."""
    base = resolve(frozenset(), TABLE_PYTHON)
    lines = ["| extra | for | packages | MB | built from source |", "|---|---|---|---:|---|"]
    lines.append(f"| none | everything else | jax, flax, transformers and others | {_sum(base, ())} | |")
    for extra, purpose in PURPOSES.items():
        found = resolve(frozenset({extra}), TABLE_PYTHON)
        packages = ", ".join(str(need) for need in declared_extras()[extra])
        lines.append(
            f"| `{extra}` | {purpose} | {packages} | {_sum(found, base.versions)} | {', '.join(found.built)} |"
        )
    return "\n".join(lines)


def _sum(found: Resolution, without: Iterable[str]) -> int:
    return round(sum(size for name, size in found.megabytes.items() if name not in set(without)))


def table_faults(written: str, current: str) -> list[str]:
    """Return the rows of a table that are out of date; sizes may be off by a third or 3 MB.

    >>> table_faults("| `a` | x | y | 10 | |", "| `a` | x | y | 12 | |")
    []
    >>> table_faults("| `a` | x | y | 10 | |", "| `a` | x | y | 90 | |")
    ['| `a` | x | y | 90 | |']
    """
    size = re.compile(r"(?<=\| )\d+(?= \|)")
    known = {size.sub("", row): size.search(row) for row in written.splitlines()}
    faults = []
    for row in current.splitlines():
        old, new = known.get(size.sub("", row)), size.search(row)
        is_near = old and new and abs(int(old[0]) - int(new[0])) <= max(3, int(new[0]) / 3)
        if size.sub("", row) not in known or (new and not is_near):
            faults.append(row)
    return faults


def main() -> int:
    """Check the extras, or write their table; return the exit code."""
    parser = argparse.ArgumentParser(description="Checks that extras can be installed, alone and together.")
    parser.add_argument("--write", action="store_true", help="write the table into docs/installation.md, check nothing")
    arguments = parser.parse_args()
    if set(PURPOSES) != set(declared_extras()):
        named = ", ".join(sorted(set(PURPOSES) ^ set(declared_extras())))
        print(f"either PURPOSES or pyproject.toml lacks these extras: {named}", file=sys.stderr)
        return 2
    before, rest = PAGE.read_text().split(BEGIN)
    written, after = rest.split(END)
    if arguments.write:
        PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
        return 0
    stale = [f"docs/installation.md has no row like this: {row}" for row in table_faults(written, table())]
    faults = stale + [fault for python in PYTHONS for fault in faults_of(python)]
    print("\n".join(faults) or "all extras fit", file=sys.stderr if faults else sys.stdout)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

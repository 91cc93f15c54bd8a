"""A wheel and a source distribution hold the package and work without the checkout; the files of the repository that
other services and coding agents read are true: workflows, AGENTS.md, the citation, the table of extras.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxft
from jaxft.harness.strict_yaml import parse_yaml
from jaxft.rollout.frameworks import WRAPPERS
from scripts.check_extras import APART, PURPOSES, PYTHONS, declared_extras, named_packages, table_faults
from scripts.check_package import repository_files, sdist_faults, wheel_faults

ROOT = Path(__file__).parents[1]
ROOT_PAGES = ["AGENTS.md", "CHANGELOG.md", "SECURITY.md", "RELEASING.md"]
NAMING = ("docs", "jaxft", "examples", "experiments")
"""Folders whose files name extras, beside the README."""
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(command, folder, **environment):
    """The finished process of a command in a folder, with changes to the environment."""
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository's files, with bytecode of a module that is no more."""
    folder = tmp_path_factory.mktemp("copy")
    for path in repository_files():
        if path.startswith("jaxft/") or "/" not in path:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    (folder / "jaxft" / "core" / "__pycache__").mkdir()
    (folder / "jaxft" / "core" / "__pycache__" / "removed.cpython-311.pyc").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(copy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    done = run([sys.executable, "-m", "pip", "wheel", *options, str(copy)], copy)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("jaxft-*.whl"))


@pytest.mark.slow
def test_the_wheel_has_the_files_of_the_package(wheel):
    assert wheel_faults(wheel) == []


@pytest.mark.slow
def test_a_wheel_with_other_files_is_refused(wheel, tmp_path):
    left_out, added = "jaxft/rollout/assets/response_templates.json", "jaxft/old_module.py"
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(tmp_path / wheel.name, "w") as other:
        for name in archive.namelist():
            if name != left_out:
                text = archive.read(name)
                other.writestr(name, text.replace(b"\nVersion: ", b"\nVersion: 9") if "METADATA" in name else text)
        other.writestr(added, "")
    missing, more, version = wheel_faults(tmp_path / wheel.name)
    assert left_out in missing and added in more and f"version 9{jaxft.__version__}" in version


@pytest.mark.slow
def test_the_source_distribution_has_what_building_takes(copy, tmp_path):
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    done = run([sys.executable, "-c", program, str(tmp_path)], copy)
    assert done.returncode == 0, done.stderr
    assert sdist_faults(next(tmp_path.glob("jaxft-*.tar.gz"))) == []


@pytest.mark.slow
def test_the_wheel_works_without_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = f"""
import jaxft
assert jaxft.__file__.startswith({str(tmp_path)!r}), jaxft.__file__
assert jaxft.load_tokenizer().decode(jaxft.load_tokenizer()("hi")["input_ids"]).endswith("hi")
from jaxft.rollout import responses
assert responses.FAMILIES_FILE.is_file()
from jaxft.cli import main
raise SystemExit(main(["doctor"]))
"""
    done = run([sys.executable, "-P", "-c", program], tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/runs (" in done.stdout and "grpo_trainer" in done.stdout


@pytest.mark.slow
def test_each_part_of_the_checks_can_be_run_alone():
    done = run([".ci/run", "nothing"], ROOT)
    assert done.returncode == 2 and "'nothing'" in done.stderr
    parts = re.findall(r"\.ci/run (\w+)  ", (ROOT / ".ci" / "run").read_text())
    assert done.stderr.split("[")[1].split("]")[0].split() == parts
    done = run([".ci/more", "nothing"], ROOT)
    offered = done.stderr.split(",")[0].split()[-1].split("|")
    assert done.returncode == 2 and {"package", "extras"} <= set(offered)
    released = re.findall(r"^\.ci/more (\w+)( [\w.]+)?$", (ROOT / "RELEASING.md").read_text(), re.MULTILINE)
    assert {part for part, name in released if not name} == set(offered)
    nightly = {name.strip() for part, name in released if part == "nightly"}
    offered = set(done.stderr.split()[-1].split("|"))
    assert {name for name in nightly if not name.endswith(("3.11", "3.13"))} == offered


def test_workflows_run_every_part_and_may_little():
    ran = []
    for path in WORKFLOWS:
        workflow = parse_yaml(path.read_text(), path.name)
        assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["cancel-in-progress"] is True
        for job in workflow["jobs"].values():
            assert 0 < job["timeout-minutes"] <= 90
            parts = job.get("strategy", {}).get("matrix", {}).get("part", [])
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
                ran += [step["run"].replace('"$PART"', part) for part in parts or [""] if "run" in step]
    parts = re.findall(r"\.ci/run (\w+)  ", (ROOT / ".ci" / "run").read_text())
    nightly = re.findall(r"^\.ci/more (nightly [\w.]+)$", (ROOT / "RELEASING.md").read_text(), re.MULTILINE)
    assert sorted(ran) == sorted(
        [*(f".ci/run {part}" for part in parts), *(f".ci/more {part}" for part in [*nightly, "package"])]
    )


def test_every_extra_has_a_row_on_the_page_of_the_installation():
    text = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| \d+ \|", text, re.MULTILINE)
    written = {name: (purpose, packages) for name, purpose, packages in rows}
    declared = {name: ", ".join(map(str, needs)) for name, needs in declared_extras().items()}
    assert written == {name: (purpose, declared.get(name)) for name, purpose in PURPOSES.items()}
    assert declared.keys() == PURPOSES.keys()
    together = text.split("**Which go together.**")[1].split("\n\n")[0]
    assert all(f"`{extra}`" in together for pair in APART for apart in pair for extra in apart)


def test_extras_are_named_as_every_pip_knows_them():
    """pip 23.2 installs nothing for an extra with an underscore, and exits with 0: metadata has a hyphen there."""
    known = declared_extras().keys()
    assert {name for name in known if name != canonicalize_name(name)} == set()
    assert {extra for _, extra in WRAPPERS.values()} <= known
    files = [ROOT / "README.md", *(each for name in NAMING for each in (ROOT / name).rglob("*"))]
    texts = [each.read_text() for each in files if each.suffix in (".md", ".py", ".yml", ".ipynb", ".toml")]
    found = {name for text in texts for names in re.findall(r"jaxft\[([\w,-]+)\]", text) for name in names.split(",")}
    assert len(found) > 8 and found - {"NAME"} <= known


def constraints(python):
    """The pinned versions for a Python on Linux, by package."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    assert len({canonicalize_name(pin.name) for pin in pins}) == len(pins)
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


DEPENDENCIES = [
    Requirement(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_pin_versions_that_are_allowed(python):
    pinned, extras = constraints(python), declared_extras()
    named = [
        need
        for extra in ("serve", "parquet", "completion", "huggingface", "wandb", "langchain", "test")
        for need in extras[extra]
    ]
    for need in [*DEPENDENCIES, *(need for need in named if need.name != "jaxft")]:
        assert need.specifier.contains(pinned[canonicalize_name(need.name)]), f"{need}: {pinned.get(need.name)}"
    assert pinned["jax-cuda13-plugin"] == pinned["jax"] == pinned["jaxlib"]


def test_a_major_version_that_was_not_tested_is_not_installed():
    users = set(PURPOSES) - {"cuda", "tpu", "test", "docs", "dev"}
    needs = [*DEPENDENCIES, *(need for extra in users for need in declared_extras()[extra] if need.name != "jaxft")]
    assert {need.name for need in needs if need.specifier.contains("9999")} == {"packaging", "pyarrow"}
    pinned = constraints(PYTHONS[-1])
    for need in needs:
        (top,) = [each.version for each in need.specifier if each.operator == "<"] or [None]
        if top is not None and canonicalize_name(need.name) in pinned:  # the newest major, and no later one
            assert int(top) == int(pinned[canonicalize_name(need.name)].split(".")[0]) + 1, need


@pytest.mark.long
def test_the_dockerfile_builds_by_its_steps(tmp_path):
    """Each step in a folder in the place of `/`, with an environment in the place of the image's Python."""
    assert run([sys.executable, "-m", "venv", str(tmp_path / "python")], ROOT).returncode == 0
    environment = {"PATH": f"{tmp_path / 'python' / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    folder, ending = tmp_path, []
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        step, _, rest = line.partition(" ")
        if step == "ARG":
            environment |= dict([rest.split("=")])
        elif step == "WORKDIR":
            folder = tmp_path / "image" / rest.removeprefix("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif step == "COPY":
            *sources, target = rest.split()
            for source in sources:
                assert f"!{source}" in (ROOT / ".dockerignore").read_text().split()
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, folder / target)
        elif step == "RUN":
            done = run(["bash", "-c", rest], folder, **environment)
            assert done.returncode == 0, done.stderr
        elif step in ("ENTRYPOINT", "CMD"):
            ending += json.loads(rest)
        else:
            assert step in ("#", "FROM"), line
    done = run(ending, folder, **environment)
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr
    installed = run(["pip", "list", "--format=freeze"], folder, **environment).stdout.split()
    assert f"jax=={constraints('.'.join(map(str, sys.version_info[:2])))['jax']}" in installed


def test_stale_rows_of_the_table_are_found():
    row = "| `a` | agents | openai>=2 | 10 | |"
    assert table_faults(row, row.replace("10", "12")) == []
    assert len(table_faults(row, row.replace("10", "20"))) == 1
    assert len(table_faults(row, row.replace("openai>=2", "openai>=3"))) == 1
    assert named_packages("serve") == ["openai", "starlette", "uvicorn", "prometheus-client"]


def test_the_pages_of_the_root_name_what_exists():
    for page in ROOT_PAGES:
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (ROOT / link).exists(), f"{page}: {link}"
    newest = re.findall(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == jaxft.__version__
    citation = parse_yaml((ROOT / "CITATION.cff").read_text(), "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["authors"]
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


def block(language):
    """The one block of a language in AGENTS.md."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "AGENTS.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture
def user_folder(tmp_path):
    """A folder with the three files of AGENTS.md."""
    for language, name in {"python": "my_agent.py", "json": "train.jsonl", "yaml": "run.yml"}.items():
        (tmp_path / name).write_text(block(language))
    return tmp_path


def test_the_page_for_coding_agents_is_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) < 150


@pytest.mark.docs
def test_the_commands_for_coding_agents_run(user_folder):
    program = f'jaxft() {{ {sys.executable} -m jaxft.cli "$@"; }}\nset -eux\n{block("bash")}'
    done = run(["bash", "-c", program], user_folder)
    assert done.returncode == 0, done.stderr
    assert "2/2 epochs" in done.stdout and (user_folder / "runs" / "my_agent" / "report.html").stat().st_size > 10_000


@pytest.mark.long
def test_the_mistakes_of_coding_agents_say_what_is_written(user_folder):
    rows = re.findall(r"^\| `(--set .*?)` \| `(.*)` \|$", (ROOT / "AGENTS.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for options, message in rows:
        command = ["finetune", "--config-file", "run.yml", "--dry-run", *shlex.split(options)]
        done = run([sys.executable, "-m", "jaxft.cli", *command], user_folder, HF_HUB_OFFLINE="1")
        assert done.returncode == 2 and message in done.stderr, f"{options}: {done.stderr}"

    agent = (user_folder / "my_agent.py").read_text()
    (user_folder / "my_agent.py").write_text(agent.replace("    yield run\n", "    return run\n"))
    done = run([sys.executable, "-m", "jaxft.cli", "finetune", "--config-file", "run.yml", "--dry-run"], user_folder)
    assert done.returncode == 2 and "is no factory: write it as `async def factory(config, builder)`" in done.stderr

    (user_folder / "my_agent.py").write_text(agent.replace("await llm.chat", "llm.chat"))
    done = run([sys.executable, "-m", "jaxft.cli", "eval", "--config-file", "run.yml"], user_folder)
    assert done.returncode == 3 and "'coroutine' object has no attribute 'content'" in done.stderr

    (user_folder / "my_agent.py").write_text(re.sub(r"yield lambda item: .*", "yield lambda item: 0.5", agent))
    done = run([sys.executable, "-m", "jaxft.cli", "finetune", "--config-file", "run.yml"], user_folder)
    assert done.returncode == 3 and "nothing could be learned" in done.stderr

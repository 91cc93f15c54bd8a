"""One fresh process shows what that of pytest cannot: what comes before jax, an exit code, a mesh of eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.compared import write_run
from tests.test_cli import RUN
from tests.test_scaling import judge

ROOT = Path(__file__).parents[1]
MODULES = [f"runs.{name}" for name in ("directory", "metrics", "environment", "console", "loggers")]
MODULES += ["cli", "components", "environments", "hosts.launch", "planning.targets", "report.command"]
HELP = """
import contextlib, io, jaxft.cli
for verb in ([], ["finetune"], ["eval"], ["resume"], ["export"], ["chat"], ["doctor"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        jaxft.cli.main([*verb, "--help"])
    assert "usage: jaxft" in shown.getvalue()
assert "openai" in jaxft.cli.help_text() and "llm_judge" in jaxft.cli.help_text()
"""
NAMESPACES = """
import jaxft.advantages, jaxft.losses, jaxft.packing, jaxft.sampling
from jaxft.losses import policy_loss
assert jaxft.losses.policy_loss is jaxft.policy_loss
"""
MESH = f"""
import runpy
sys.argv[1:] = ["--mesh", "2x2x2", "--only", "gradients", "--out", "mesh.json"]
runpy.run_path("{ROOT}/benchmarks/scaling.py", run_name="scaling")["main"]()
"""
OWN = """
from tests.models.test_bridge import differences_on_mesh, nnx_model
with open("own.json", "w") as file:
    json.dump(differences_on_mesh(nnx_model, (2, 2, 2)), file)
"""
STEPS = {
    "import": "import jaxft",
    "episodes": "import jaxft.episodes",
    "components": "from jaxft import LocalPolicyConfig, GRPOTrainerConfig, DPOTrainerConfig",
    "modules": f"import {', '.join(f'jaxft.{name}' for name in MODULES)}",
    "help": HELP,
    "example": "import jaxft_example",
    "plots": "import jaxft.runs.plots",
    "comparison": "assert jaxft.cli.main(['compare', 'run']) == 0",
    "finetune": "assert jaxft.cli.main(['finetune', '--config-file', 'run.yml']) == 0",
    "namespaces": NAMESPACES,
    "mesh": MESH,
    "own": OWN,
}
PROGRAM = """
import json, sys
heavy, imported = {"jax", "flax", "optax", "orbax", "transformers", "openai", "httpx", "matplotlib", "tensorboardX"}, {}
for name, step in json.loads(sys.argv[1]).items():
    exec(step)
    imported[name] = sorted(heavy & set(sys.modules))
with open("imported.json", "w") as file:
    json.dump(imported, file)
sys.exit(jaxft.cli.main([]))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The finished process, and its folder."""
    folder = tmp_path_factory.mktemp("fresh")
    write_run(folder / "run", [0.1, 0.2])
    (folder / "run.yml").write_text(RUN)
    (folder / "rows.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "custom_components")])
    command = [sys.executable, "-c", PROGRAM, json.dumps(STEPS)]
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True), folder


@pytest.mark.parametrize("step", list(STEPS)[: list(STEPS).index("finetune")])
def test_nothing_heavy_is_imported_before_it_is_used(process, step):
    ended, folder = process
    assert (folder / "imported.json").is_file(), ended.stderr
    imported = json.loads((folder / "imported.json").read_text())
    assert imported[step] == (["matplotlib"] if step in ("plots", "comparison") else [])


def test_a_run_imports_the_users_modules_before_jax(process):
    _, folder = process
    assert json.loads((folder / "out" / "result.json").read_text())["jobs_completed"] == 1
    assert "INFO cli_parts: imported, jax: False" in (folder / "out" / "run.log").read_text()


def test_a_verb_is_needed(process):
    ended, _ = process
    assert ended.returncode == 2 and "VERB" in ended.stderr.splitlines()[-1]


def test_gradients_on_a_mesh_of_all_axes(process):
    _, folder = process
    found = json.loads((folder / "mesh.json").read_text())["found"]["2x2x2"]
    judge(found, "gradients")
    assert found["shares of trajectories"] < 1e-6


def test_a_network_of_ones_own_samples_on_a_mesh_what_one_device_scores(process):
    _, folder = process
    assert max(json.loads((folder / "own.json").read_text())) < 1e-5

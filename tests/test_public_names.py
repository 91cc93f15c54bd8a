"""`import jaxft` offers every name of its stub and its namespaces, and imports nothing heavy before it is used."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import jaxft

NAMESPACES = {name for name in jaxft.__all__ if isinstance(getattr(jaxft, name), ModuleType)}
PROGRAMS = {
    "import": "import jaxft",
    "command line": (
        "import contextlib, io, jaxft.cli\n"
        "for verb in ([], ['finetune'], ['eval'], ['resume'], ['export'], ['doctor']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        jaxft.cli.main([*verb, '--help'])\n"
        "    assert 'usage: jaxft' in shown.getvalue()"
    ),
    "registered components": "from jaxft import LocalPolicyConfig, GRPOTrainerConfig, DPOTrainerConfig",
    "episodes": "import jaxft.episodes",
}


def test_every_name_is_there():
    assert jaxft.__all__ and all(getattr(jaxft, name) is not None for name in jaxft.__all__)


def test_a_class_has_one_name_and_a_name_one_object():
    namespaces = {name: vars(getattr(jaxft, name)) for name in NAMESPACES}
    found = {"": {name: getattr(jaxft, name) for name in jaxft.__all__}, **namespaces}
    by_name = {}
    for names in found.values():
        for name, value in names.items():
            if not name.startswith("_"):
                by_name.setdefault(name, set()).add(id(value))
    assert {name for name, values in by_name.items() if len(values) > 1} == set()


def test_the_shipped_components_can_be_imported():
    assert issubclass(jaxft.GRPOTrainer, jaxft.Trainer) and issubclass(jaxft.DPOTrainer, jaxft.Trainer)
    assert issubclass(jaxft.GRPOTrajectoryBuilder, jaxft.TrajectoryBuilder)
    assert issubclass(jaxft.DPOTrajectoryBuilder, jaxft.TrajectoryBuilder)
    assert issubclass(jaxft.LocalTrainerAdapter, jaxft.TrainerAdapter)


def test_namespaces_are_modules_too():
    assert {"advantages", "episodes", "losses", "packing", "sampling"} == NAMESPACES
    program = "; ".join(f"import jaxft.{name}" for name in sorted(NAMESPACES))
    program += "; from jaxft.losses import policy_loss; assert jaxft.losses.policy_loss is jaxft.policy_loss"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(importlib.import_module(f"jaxft.{name}") is getattr(jaxft, name) for name in NAMESPACES)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_nothing_heavy_is_imported_before_it_is_used(program):
    program += "\nimport sys; print(*sorted({'jax', 'transformers', 'flax', 'optax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []

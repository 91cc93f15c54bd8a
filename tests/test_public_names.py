"""`import jaxft` offers every name of its stub and its namespaces, and none is lost from one version to the next."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import jaxft

NAMESPACES = {name for name in jaxft.__all__ if isinstance(getattr(jaxft, name), ModuleType)}
FROZEN = Path(__file__).parent / "data" / "public_names.txt"


def offered_names():
    """The public names of `jaxft`, its namespaces among them, and of each namespace."""
    own = {
        f"jaxft.{space}": {
            name
            for name, value in vars(getattr(jaxft, space)).items()
            if not (name.startswith("_") or isinstance(value, ModuleType))
        }
        for space in NAMESPACES
    }
    return {"jaxft": set(jaxft.__all__), **own}


def test_public_names_are_frozen():
    offered = {f"{place}.{name}" for place, names in offered_names().items() for name in names}
    frozen = FROZEN.read_text().split()
    lost = sorted(set(frozen) - offered - {f"jaxft.{name}" for name in jaxft.MOVED})
    assert not lost, f"{lost}: a name lasts one version more; see 'What users hold on to' in CONTRIBUTING.md"
    assert sorted(offered - set(frozen)) == [], f"these names are new: write them into {FROZEN.name}"
    assert frozen == sorted(set(frozen)), f"{FROZEN.name} is not sorted"


def test_a_name_that_goes_says_what_takes_its_place(monkeypatch):
    monkeypatch.setitem(jaxft.MOVED, "old_loss", "jaxft.losses:policy_loss")
    with pytest.warns(FutureWarning, match=r"jaxft\.old_loss .*jaxft\.losses\.policy_loss") as warned:
        assert jaxft.old_loss is jaxft.policy_loss
    assert warned[0].filename == __file__ and "old_loss" not in dir(jaxft)
    with pytest.raises(AttributeError, match="older_loss"):
        _ = jaxft.older_loss
    for place in jaxft.MOVED.values():
        pkgutil.resolve_name(place)


def test_every_name_is_there():
    assert jaxft.__all__ and all(getattr(jaxft, name) is not None for name in jaxft.__all__)


def test_a_class_has_one_name_and_a_name_one_object():
    by_name = {}
    for place, names in offered_names().items():
        for name in names:
            by_name.setdefault(name, set()).add(id(getattr(importlib.import_module(place), name)))
    assert {name for name, values in by_name.items() if len(values) > 1} == set()


def test_the_shipped_components_can_be_imported():
    assert issubclass(jaxft.GRPOTrainer, jaxft.Trainer) and issubclass(jaxft.DPOTrainer, jaxft.Trainer)
    assert issubclass(jaxft.GRPOTrajectoryBuilder, jaxft.TrajectoryBuilder)
    assert issubclass(jaxft.DPOTrajectoryBuilder, jaxft.TrajectoryBuilder)
    assert issubclass(jaxft.LocalTrainerAdapter, jaxft.TrainerAdapter)


def test_namespaces_are_modules_too():
    assert {"advantages", "episodes", "losses", "packing", "sampling"} == NAMESPACES
    assert all(importlib.import_module(f"jaxft.{name}") is getattr(jaxft, name) for name in NAMESPACES)

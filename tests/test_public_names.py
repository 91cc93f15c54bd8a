"""`import jaxft` offers every name of its stub and its namespaces."""

import importlib
from types import ModuleType

import jaxft

NAMESPACES = {name for name in jaxft.__all__ if isinstance(getattr(jaxft, name), ModuleType)}


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
    assert all(importlib.import_module(f"jaxft.{name}") is getattr(jaxft, name) for name in NAMESPACES)

"""Components written as the toolkit's guide teaches it; only where they import from is jaxft's."""

from . import dpo_traj_builder, evaluator, trainer, trainer_adapter, traj_builder  # noqa: F401

"""The public names of `jaxft.components`, each imported when it is first used; the outbuildings use no others."""

from .local_policy import (
    resolve_dtypes as resolve_dtypes,
)
from .programs import (
    Programs as Programs,
    PlannedRun as PlannedRun,
    mesh_of_devices as mesh_of_devices,
    mesh_shape as mesh_shape,
    planned_run as planned_run,
    run_from_json as run_from_json,
)

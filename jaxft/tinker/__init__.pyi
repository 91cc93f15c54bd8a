"""The public names of `jaxft.tinker`, each imported when it is first used."""

from .app import (
    make_app as make_app,
)
from .client import (
    APIFuture as APIFuture,
    Datum as Datum,
    ModelInput as ModelInput,
    SamplingClient as SamplingClient,
    ServiceClient as ServiceClient,
    TensorData as TensorData,
    TrainingClient as TrainingClient,
)
from .service import (
    SamplingParams as SamplingParams,
    Service as Service,
)
from .training import (
    AdamParams as AdamParams,
)

"""The public names of `jaxft.tinker`, each imported when it is first used."""

from .app import (
    make_app as make_app,
)
from .client import (
    APIFuture as APIFuture,
    SamplingClient as SamplingClient,
    ServiceClient as ServiceClient,
    TrainingClient as TrainingClient,
)
from .data import (
    AdamParams as AdamParams,
    Datum as Datum,
    ModelInput as ModelInput,
    SamplingParams as SamplingParams,
    TensorData as TensorData,
)
from .service import (
    Service as Service,
)

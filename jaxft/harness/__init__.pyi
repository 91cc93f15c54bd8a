"""The public names of `jaxft.harness`, each imported when it is first used; the outbuildings use no others."""

from .addresses import (
    Limits as Limits,
    is_loopback as is_loopback,
)
from .registry import (
    REGISTRY as REGISTRY,
)
from .runtime import (
    exit_code_of as exit_code_of,
)
from .verbs import (
    Verb as Verb,
    override_arguments as override_arguments,
    whole_number as whole_number,
)

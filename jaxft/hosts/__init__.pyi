"""The public names of `jaxft.hosts`, each imported when it is first used; the outbuildings use no others."""

from .launch import (
    START as START,
)
from .meeting import (
    is_loopback as is_loopback,
)

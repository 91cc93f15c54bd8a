"""The public names of `jaxft.training`, each imported when it is first used; the outbuildings use no others."""

from .rows import (
    with_recorded_sequences as with_recorded_sequences,
)

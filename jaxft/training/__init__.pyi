"""The public names of `jaxft.training`, each imported when it is first used; the outbuildings use no others."""

from .function_checks import (
    check_signatures as check_signatures,
)
from .memory import (
    peak as peak,
    phases as phases,
)
from .rows import (
    with_recorded_sequences as with_recorded_sequences,
)

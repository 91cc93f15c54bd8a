"""The public names of `jaxft.rollout`, each imported when it is first used; the outbuildings use no others."""

from .frameworks import (
    client_of as client_of,
)
from .language_model import (
    LanguageModel as LanguageModel,
)

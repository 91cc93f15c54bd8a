"""Pure functions from arrays to arrays. The core knows nothing of files, clocks, tokenizers or configurations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""The largest number of float32; a larger one is infinite on the device."""

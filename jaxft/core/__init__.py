"""Pure functions from arrays to arrays. The core knows nothing of files, clocks, tokenizers or configurations."""

LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
"""The largest number of float32; a larger one is infinite on the device."""

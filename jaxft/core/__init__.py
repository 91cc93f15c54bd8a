"""Pure JAX: arrays in, arrays out. Nothing here knows of files, clocks, tokenizers or configuration objects."""

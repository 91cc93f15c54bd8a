"""A live policy: weights, tokenizer and engine behind an asynchronous chat client that records its calls."""

import os

import lazy_loader

# Set before transformers is imported, which else announces that PyTorch is missing.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""A live policy: weights, tokenizer and engine behind an asynchronous chat client that records its calls."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

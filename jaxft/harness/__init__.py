"""The contracts of finetuning (builder, adapter, trainer), their configuration, and the asynchronous runtime."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Output of a run: its directory, checkpoints, metrics and plots, and the console."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

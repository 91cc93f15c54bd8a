"""Language models behind the contract of `jaxft.core.types.Model`, and the file formats of their weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

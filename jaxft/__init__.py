"""jaxft finetunes the language model inside an agent, in the process the agent runs in.

The public names stand in `__init__.pyi`, the namespaces among them: `jaxft.losses`, `jaxft.advantages`,
`jaxft.packing`, `jaxft.sampling` and `jaxft.episodes`. Each name is imported when it is first used (PEP 562), so
`import jaxft` alone loads neither jax nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

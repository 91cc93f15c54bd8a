"""The components that come with jaxft.

Importing this package registers their configurations. The modules of the components, and jax with them, are imported
when a component is first made.
"""

import lazy_loader

import jaxft.components.configs
import jaxft.components.evaluators
import jaxft.components.http_agent
import jaxft.components.single_turn  # noqa: F401

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

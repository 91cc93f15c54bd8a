"""Tinker's interface to the trainer and the sampler: scripts written for that service train on this machine.

`service` has the verbs, `client` the same without a socket, `app` serves them to Tinker's own client.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

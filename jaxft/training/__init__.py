"""Training on trajectories: token rows, batches with advantages, and the learner that runs a job's updates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

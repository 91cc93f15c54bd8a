"""The components that jaxft ships, registered when this package is imported; none imports jax before it is made."""

import jaxft.components.dpo_builder
import jaxft.components.dpo_trainer
import jaxft.components.grpo_builder
import jaxft.components.grpo_trainer
import jaxft.components.local_adapter
import jaxft.components.local_policy  # noqa: F401

"""Components of one's own: importing this package registers them, which is all that its entry point asks for."""

import jaxft_example.evaluator
import jaxft_example.trainer
import jaxft_example.trainer_adapter
import jaxft_example.traj_builder
import jaxft_example.workflow  # noqa: F401

"""The reward: the share of digits in the answer."""

import jaxft


class DigitsConfig(jaxft.EvaluatorConfig, name="digits"):
    """The share of digits in the answer."""


@jaxft.register_evaluator(config_type=DigitsConfig)
async def digits(config, builder):
    yield lambda item: sum(map(str.isdigit, item.output_obj)) / max(len(item.output_obj), 1)

"""Sampling of one token per row from logits, with a key and sampling parameters per row."""

from jaxft.core.sampling import LogitBias as LogitBias
from jaxft.core.sampling import Sampled as Sampled
from jaxft.core.sampling import SamplingParams as SamplingParams
from jaxft.core.sampling import sample as sample
from jaxft.core.sampling import sampling_params as sampling_params

"""Losses of a batch: objectives for `make_update`, the loss terms that they consist of, and log-probabilities."""

from jaxft.core.correction import sampler_correction as sampler_correction
from jaxft.core.divergence import Teacher as Teacher
from jaxft.core.divergence import divergence as divergence
from jaxft.core.losses import PRESETS as PRESETS
from jaxft.core.losses import k1_penalty as k1_penalty
from jaxft.core.losses import kl_penalty as kl_penalty
from jaxft.core.losses import policy_loss as policy_loss
from jaxft.core.losses import preference_loss as preference_loss
from jaxft.core.losses import value_loss as value_loss
from jaxft.core.objectives import PolicyLoss as PolicyLoss
from jaxft.core.objectives import dpo_loss as dpo_loss
from jaxft.core.objectives import grpo_loss as grpo_loss
from jaxft.core.objectives import ppo_loss as ppo_loss
from jaxft.core.objectives import score_batch as score_batch
from jaxft.core.objectives import sft_loss as sft_loss
from jaxft.core.reductions import aggregate as aggregate
from jaxft.core.reductions import token_mean as token_mean
from jaxft.core.surrogates import clipped_surrogate as clipped_surrogate

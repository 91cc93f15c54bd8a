"""Advantages: how much better an answer, a step or a token is than its group, its batch or its value predicts."""

from jaxft.core.advantages import Estimator as Estimator
from jaxft.core.advantages import batch_advantages as batch_advantages
from jaxft.core.advantages import exponential_advantages as exponential_advantages
from jaxft.core.advantages import gae as gae
from jaxft.core.advantages import group_advantages as group_advantages
from jaxft.core.advantages import group_mean_advantages as group_mean_advantages
from jaxft.core.advantages import leave_one_out_advantages as leave_one_out_advantages
from jaxft.core.advantages import max_rl_advantages as max_rl_advantages
from jaxft.core.advantages import normalize_then_sum as normalize_then_sum
from jaxft.core.advantages import optimal_token_advantages as optimal_token_advantages
from jaxft.core.advantages import outcome_rewards as outcome_rewards
from jaxft.core.advantages import pass_at_k_advantages as pass_at_k_advantages
from jaxft.core.advantages import reward_to_go as reward_to_go
from jaxft.core.advantages import soft_overlong_punishment as soft_overlong_punishment
from jaxft.core.advantages import step_advantages as step_advantages
from jaxft.core.advantages import weighted_sum as weighted_sum
from jaxft.core.advantages import whiten as whiten

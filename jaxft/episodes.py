"""Recorded episodes for trajectory builders: which calls are trained on, their training rows, and their messages."""

from jaxft.rollout.calls import Call as Call
from jaxft.rollout.recorder import TRAINING as TRAINING
from jaxft.rollout.recorder import VALIDATION as VALIDATION
from jaxft.rollout.recorder import Episode as Episode
from jaxft.rollout.sequences import TokenSequence as TokenSequence
from jaxft.rollout.sequences import episode_messages as episode_messages
from jaxft.rollout.sequences import is_targeted as is_targeted
from jaxft.rollout.sequences import token_sequences as token_sequences

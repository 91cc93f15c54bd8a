"""The public names of `jaxft.models`, each imported when it is first used; the outbuildings use no others."""

from .decoder_sharding import (
    rules_table as rules_table,
)
from .attention import (
    MOST_SCORES as MOST_SCORES,
)
from .ceilings import (
    CHIPS as CHIPS,
    Chip as Chip,
    attention_flops as attention_flops,
    block_weights as block_weights,
    decode_bytes as decode_bytes,
    head_weights as head_weights,
    model_flops as model_flops,
    projection_shapes as projection_shapes,
    tokens_seen as tokens_seen,
)
from .decoder import (
    parameter_shapes as parameter_shapes,
)
from .layer_stack import (
    auto_remats as auto_remats,
    Remat as Remat,
    layer_runs as layer_runs,
)
from .flash import (
    Choice as Choice,
    Kernel as Kernel,
    MOST_SEGMENTS as MOST_SEGMENTS,
    compute_capability as compute_capability,
)
from .load import (
    init_adapter as init_adapter,
    with_adapters as with_adapters,
)

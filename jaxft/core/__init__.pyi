"""The public names of `jaxft.core`, each imported when it is first used; the outbuildings use no others."""

from .fused_head import (
    SLICE_LOGITS as SLICE_LOGITS,
    takes_fused_head as takes_fused_head,
)
from .logprobs import (
    default_chunk_tokens as default_chunk_tokens,
)
from .partition import (
    ADAPTER as ADAPTER,
    BASE as BASE,
    trainable as trainable,
)
from .sharding import (
    AXES as AXES,
    device_bytes as device_bytes,
)
from .update import (
    Sums as Sums,
    Update as Update,
    add_microbatch as add_microbatch,
)

LARGEST_FLOAT32: float

"""The public names of `jaxft.rollout`, each imported when it is first used; the outbuildings use no others."""

from .tokenizer import (
    load_tokenizer as load_tokenizer,
)
from .client import (
    ChatClient as ChatClient,
)
from .chat import (
    ChatTemplate as ChatTemplate,
)
from .calls import (
    logprobs_with_record as logprobs_with_record,
    openai_logprobs as openai_logprobs,
    split_token_text as split_token_text,
)
from .chat_request import (
    MAX_CHOICES as MAX_CHOICES,
    CompletionRequest as CompletionRequest,
)
from .current import (
    find_episode as find_episode,
    recording as recording,
)
from .device import (
    first_line as first_line,
    is_out_of_memory as is_out_of_memory,
)
from .frameworks import (
    framework_client as framework_client,
)
from .language_model import (
    LanguageModel as LanguageModel,
)
from .messages import (
    MAX_TOOLS as MAX_TOOLS,
    TOOL_NAME as TOOL_NAME,
)
from .decode_batch import (
    prefill_programs as prefill_programs,
)
from .recorder import (
    ENDPOINT as ENDPOINT,
    TRAINING as TRAINING,
    episode_of_token as episode_of_token,
    is_episode_token as is_episode_token,
)
from .requests import (
    MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS,
    Request as Request,
)
from .transport import (
    async_transport as async_transport,
)
from .streaming import (
    StopFinder as StopFinder,
)

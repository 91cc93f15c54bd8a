"""The public names of `jaxft.runs`, each imported when it is first used; the outbuildings use no others."""

from .checkpoint import (
    Checkpoints as Checkpoints,
)
from .plots import (
    plot_rewards as plot_rewards,
)
from .console import (
    Console as Console,
    current_console as current_console,
    printable as printable,
)
from .directory import (
    holder_of_lock as holder_of_lock,
)
from .environment import (
    is_secret_name as is_secret_name,
    masked_command as masked_command,
    secrets_in_urls as secrets_in_urls,
    secrets_of_environment as secrets_of_environment,
    version as version,
)
from .files import (
    CONFIG_FILE as CONFIG_FILE,
    LOG_FILE as LOG_FILE,
    METRICS_FILE as METRICS_FILE,
    PAIRS_FILE as PAIRS_FILE,
    SAMPLES_FILE as SAMPLES_FILE,
    TOKEN_SCORES_FILE as TOKEN_SCORES_FILE,
    holds_run as holds_run,
)
from .metrics import (
    NAMED_REWARD as NAMED_REWARD,
    reward_figures as reward_figures,
)
from .records import (
    Row as Row,
    RunRecords as RunRecords,
    episode_key as episode_key,
    flat as flat,
    numbered_rows as numbered_rows,
    parse_row as parse_row,
    read_run as read_run,
    unreadable as unreadable,
)

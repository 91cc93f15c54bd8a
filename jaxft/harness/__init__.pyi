"""The public names of `jaxft.harness`, each imported when it is first used; the outbuildings use no others."""

from .addresses import (
    Limits as Limits,
)
from .checkpointing import (
    changed_settings as changed_settings,
)
from .commands import (
    open_models as open_models,
)
from .config import (
    EvalConfig as EvalConfig,
    EvalGeneralConfig as EvalGeneralConfig,
    ValidationConfig as ValidationConfig,
    config_secrets as config_secrets,
)
from .config_merge import (
    ConfigErrors as ConfigErrors,
    OUTPUT_DIR as OUTPUT_DIR,
    escape_fields as escape_fields,
    expanded as expanded,
    has_fields as has_fields,
    literal as literal,
    override as override,
    read_layers as read_layers,
    with_fields_expanded as with_fields_expanded,
)
from .isolation import (
    WorkerPool as WorkerPool,
)
from .process import (
    prepare_process as prepare_process,
)
from .registry import (
    ComponentConfig as ComponentConfig,
    REGISTRY as REGISTRY,
)
from .runtime import (
    complain as complain,
    command_line_config as command_line_config,
    run_main as run_main,
)
from .session import (
    resume_command as resume_command,
)
from .signals import (
    Shutdown as Shutdown,
    current_shutdown as current_shutdown,
)
from .strict_yaml import (
    parse_yaml as parse_yaml,
)
from .verbs import (
    OptionParser as OptionParser,
    Verb as Verb,
    override_arguments as override_arguments,
    whole_number as whole_number,
)

"""What `import jaxft` offers: every name of the stub is there, and nothing heavy is imported before it is used."""

import subprocess
import sys

import jaxft


def test_every_name_is_there():
    assert jaxft.__all__ and all(getattr(jaxft, name) is not None for name in jaxft.__all__)


def test_the_help_of_the_command_line_imports_neither_jax_nor_transformers():
    program = (
        "import sys, contextlib, io, jaxft.cli\n"
        "for verb in ([], ['finetune'], ['eval'], ['resume'], ['export'], ['doctor']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:\n"
        "        jaxft.cli.main([*verb, '--help'])\n"
        "    assert 'usage: jaxft' in shown.getvalue()\n"
        "print(*sorted({'jax', 'transformers', 'flax', 'optax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []

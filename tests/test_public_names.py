"""What `import jaxft` offers: every name is there, and type checkers see what it is."""

from pathlib import Path

import jaxft

STUB = Path(jaxft.__file__).with_suffix(".pyi")


def stub_text() -> str:
    """The stub that the table of names stands for; `python tests/test_public_names.py` writes it."""
    lines = ['"""The public names for type checkers, which cannot follow names that are imported when first used."""\n']
    for module, names in sorted(jaxft._HOMES.items()):
        lines.append(f"from {module} import (")
        lines += [f"    {name} as {name}," for name in sorted(names)]
        lines.append(")")
    return "\n".join([*lines, "", "__version__: str", ""])


def test_type_checkers_see_the_same_names():
    assert STUB.read_text() == stub_text()


def test_every_name_is_there():
    assert all(getattr(jaxft, name) is not None for name in jaxft.__all__)


if __name__ == "__main__":
    STUB.write_text(stub_text())

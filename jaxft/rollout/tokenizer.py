"""A transformers tokenizer: loading one, and the text and bytes of its single tokens.

A token may hold only a part of a character, and a decoder may treat the first token of a text in a way of its own:
SentencePiece's drop the space that it begins with.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as Sequential
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations import gguf as gguf_tokenizers  # whose parts are imported when they are used

from jaxft.models.gguf import gguf_file, read_header
from jaxft.models.hf_files import GGUF, local_folder

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_PATTERNS = ("*token*.json", "chat_template*", "vocab*", "merges.txt", "*.model", "config.json")
"""Files of a tokenizer on the hub."""

CHAR_TOKENIZER = Path(__file__).parent / "assets" / "char_tokenizer"
"""Folder of the embedded tokenizer, with a token per byte and the control tokens of a chat."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MARKED = "\U000f0000"
"""Begins a control token in the text of a message; see `mark_control_tokens` of transformers."""

CONTINUED = "\U000f0001"
"""Mark at the start of a text that continues another; transformers encodes what follows a mark without a space."""


def load_tokenizer(path_or_hub_id: str | os.PathLike[str] | None = None) -> Any:
    """Load a transformers tokenizer from a folder, a GGUF file or a hub id; for None, the embedded byte-level one.

    Code in the folder is never run. Texts are divided into tokens as its `tokenizer.json` has it, if there is one.

    Raises:
        ValueError: no tokenizer can be loaded, or it has no chat template, a malformed one, or no eos_token.
    """
    source = CHAR_TOKENIZER if path_or_hub_id is None else Path(path_or_hub_id).expanduser()
    try:
        if not source.exists():  # transformers would ask for each file, for a minute without a network
            source = local_folder(source, TOKENIZER_PATTERNS)
        gguf = None if (source / TOKENIZER_FILE).is_file() else gguf_file(source)
        # Without the argument, transformers asks in the terminal whether to run code of the folder.
        tokenizer = _of_gguf(gguf) if gguf else AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if tokenizer.is_fast and type(tokenizer) is not PreTrainedTokenizerFast and (source / TOKENIZER_FILE).is_file():
            # The class that was chosen has a pre-tokenizer, a normalizer and a decoder of its own, and gives other ids.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    except Exception as error:  # other people's files: whatever transformers, or a package that it lacks, may raise
        raise ValueError(
            f"no tokenizer could be loaded from {str(source)!r} ({type(error).__name__}: {_first_line(error)}); "
            f"{_way_out(source)}"
        ) from error
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {str(source)!r} has no chat template; add a chat_template.jinja there")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer in {str(source)!r} names no eos_token, so nothing would end an answer")
    try:
        tokenizer.get_chat_template()
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except (jinja2.TemplateSyntaxError, ValueError) as error:
        raise ValueError(f"the chat template of {str(source)!r} cannot be used: {_first_line(error)}") from error
    except Exception:  # this conversation is none for the template; others may be
        pass
    return tokenizer


def _of_gguf(file: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the metadata of a GGUF file, as transformers makes it."""
    metadata = read_header(file).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("it holds no tokenizer.ggml.tokens")
    given = {key.removeprefix("tokenizer."): value for key, value in metadata.items()}
    names = gguf_tokenizers.GGUF_TOKENIZER_MAPPING.values()
    parts, options = ({ours: given[key] for key, ours in keys.items() if key in given} for keys in names)
    known = set(parts["tokens"])
    for merge in parts.get("merges", ()):  # the tokenizers package ends the process's thread for these
        if merge.count(" ") != 1 or merge.replace(" ", "") not in known:
            raise ValueError(f"tokenizer.ggml.merges has {merge!r:.50}; wanted two parts of a token")
    for key, value in parts.items():
        if key.endswith("_token_id") and not 0 <= value < len(parts["tokens"]):
            raise ValueError(f"{key} is {value}; wanted one of {len(parts['tokens'])} tokens")
    backend, _ = gguf_tokenizers.convert_gguf_tokenizer(metadata["general.architecture"], parts)
    if backend.get_vocab_size() > len(parts["tokens"]):  # GPT-2's own <|endoftext|>, for which the model has no row
        spec = json.loads(backend.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] < len(parts["tokens"])]
        backend = Tokenizer.from_str(json.dumps(spec))
    if parts.get("pre_tokenizer_type") == "smollm":  # it divides digits before words, which transformers leaves out
        backend.pre_tokenizer = Sequential([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if parts["tokenizer_type"] == "llama":  # SentencePiece's, whose older files lack the flag
        options.setdefault("add_bos_token", True)
    for key in parts.keys() & {"bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"}:
        options[key.removesuffix("_id")] = parts["tokens"][parts[key]]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _way_out(source: Path) -> str:
    """Return what to do about a tokenizer that could not be loaded."""
    if source.suffix.lower() == GGUF:
        return "give the folder or id of the tokenizer that the model was trained with as `tokenizer`"
    if not (source / "tokenizer.json").is_file() and (models := sorted(source.glob("*.model"))):
        return (
            f"transformers reads {models[0].name} with the packages sentencepiece or tiktoken (`pip install "
            "sentencepiece tiktoken`); or give the folder a tokenizer.json"
        )
    return "give the folder of a Hugging Face tokenizer, or leave `tokenizer` out for the embedded one"


def eos_ids(model_folder: str | os.PathLike[str] | None) -> list[int]:
    """Return the `eos_token_id` of a model's folder, from `generation_config.json` or, without one, `config.json`."""
    names = ("generation_config.json", "config.json")
    files = [] if model_folder is None else [Path(model_folder, name) for name in names]
    file = next((file for file in files if file.is_file()), None)
    listed = None if file is None else json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return listed if isinstance(listed, list) else [] if listed is None else [listed]


class TextEncoder:
    """Encodes rendered conversations, in which control tokens stand for themselves unless `MARKED`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder: Any = None
        if tokenizer.is_fast:  # the tokenizer's own encoder takes a quarter of the time
            self._encoder = tokenizer.backend_tokenizer
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._encoder.encode_special_tokens = tokenizer.split_special_tokens
            self._newline_ids = self._encode("\n")

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, which may begin with `CONTINUED`."""
        plain = text.removeprefix(CONTINUED)
        if self._encoder is None or MARKED in plain or CONTINUED in plain:
            return tuple(self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)["input_ids"])
        if plain != text:  # as transformers encodes what follows a mark
            ids = self._encode("\n" + plain)
            if ids[: len(self._newline_ids)] == self._newline_ids:
                return ids[len(self._newline_ids) :]
        return self._encode(plain)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class TokenTexts:
    """Decodes token ids, many or one; ids that the tokenizer does not have, those of padding rows, have no text.

    Attributes:
        byte_ids: ids of SentencePiece's tokens of one byte, such as `<0xE4>`. Decoders take those that stand together
            as one text, and if that is not valid UTF-8, they replace all of it, complete characters included.
        control_ids: ids of control tokens, which an answer's text is without.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._size = num_token_ids(tokenizer)
        special = {token_id for token_id, token in self._added.items() if token.special}
        self.control_ids = frozenset(special.union(tokenizer.all_special_ids))
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
        known = [(name, token_id) for name, token_id in ids if token_id is not None]
        self.byte_ids = frozenset(
            token_id
            for name, token_id in known
            if tokenizer.convert_ids_to_tokens(token_id) == name and tokenizer.decode([token_id]) != name
        )
        self._known: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        known = [token_id for token_id in token_ids if token_id < self._size]
        # Cleaning up English punctuation would change text that was streamed already.
        return str(
            self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def is_byte(self, token_id: int) -> bool:
        """Return True for one of SentencePiece's tokens of one byte."""
        return token_id in self.byte_ids

    def decoded_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that goes on."""
        if token_id not in self._known:
            self._known[token_id] = self._find_bytes(token_id)
        return self._known[token_id]

    def decoded_text(self, token_id: int) -> str:
        """Return `decoded_bytes` as text; bytes of no whole character are lone surrogates, as in `os.fsdecode`."""
        return self.decoded_bytes(token_id).decode(errors="surrogateescape")

    def begin_within(self, token_ids: Sequence[int], text: str, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the places of the tokens of a text, in which control tokens are marked, that begin within its spans.

        There are none if the tokens have other bytes than the text, which some tokenizers change.
        """
        own = [self.decoded_bytes(token_id) for token_id in token_ids]
        if b"".join(own) != _plain_bytes(text):
            return ()
        of_bytes = [[len(_plain_bytes(text[:end])) for end in span] for span in spans]
        begun = enumerate(zip(itertools.accumulate(map(len, own), initial=0), own, strict=False))
        return tuple(
            place for place, (start, its) in begun if its and any(first <= start < end for first, end in of_bytes)
        )

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id >= self._size:
            return b""
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if token_id in self.byte_ids:
            return bytes([int(name[3:5], 16)])
        # The second of two equal tokens is not the first of a text.
        once, twice = self.decode([token_id]), self.decode([token_id, token_id])
        text = twice[len(once) :] if twice.startswith(once) else once
        if REPLACEMENT in twice and name is not None and all(character in BYTE_OF_CHARACTER for character in name):
            return bytes(BYTE_OF_CHARACTER[character] for character in name)
        return text.encode()


def _plain_bytes(text: str) -> bytes:
    return text.replace(MARKED, "").replace(CONTINUED, "").encode()


def num_token_ids(tokenizer: Any) -> int:
    """Return the number of embedding rows that a tokenizer needs: one more than its largest id, of added tokens too."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write in place of it, as GPT-2 did first."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()

"""Text and bytes of single tokens, for a tokenizer of any kind.

A token may hold only a part of a character, and a decoder may treat the first token of a text in a way of its own:
SentencePiece's drop the space that it begins with.
"""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that goes on."""
        if token_id not in self._known:
            self._known[token_id] = self._find_bytes(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """Return `bytes_of` as text; bytes that are no whole character are lone surrogates, as in `os.fsdecode`."""
        return self.bytes_of(token_id).decode(errors="surrogateescape")

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


def num_token_ids(tokenizer: Any) -> int:
    """Return the number of embedding rows that a tokenizer needs: one more than its largest id, of added tokens too."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def split_token_text(text: str) -> tuple[str, bytes]:
    """Return a token's text as JSON can hold it, and its bytes.

    >>> split_token_text(b" \\xc3".decode(errors="surrogateescape"))
    (' �', b' \\xc3')
    """
    raw = text.encode(errors="surrogateescape")
    return raw.decode(errors="replace"), raw


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character that byte-level tokenizers write in place of it, as GPT-2 did first."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()

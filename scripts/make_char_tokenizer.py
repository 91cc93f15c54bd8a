"""Write the embedded byte tokenizer as a Hugging Face tokenizer folder.

    python scripts/make_char_tokenizer.py                  # rewrites the shipped files
    python scripts/make_char_tokenizer.py elsewhere        # writes a copy

Ids 0 to 5 are the special tokens, id 6 + b is byte b: one token per ASCII character, and any text decodes to itself. It
is a byte-level BPE without merges, so every tool that reads `tokenizer.json` reads it. The files are spelt out here and
not saved by a library, so that their bytes do not depend on an installed version.
"""

import json
import sys
from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "jaxft" / "rollout" / "assets" / "char_tokenizer"

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIALS = (PAD, END, *(f"<|{role}|>" for role in ROLES))

# A turn ends with the token that the policy samples to stop, and no token stands between two turns, so the recorded ids
# of a conversation are a prefix of the ids of its continuation. Functions and the environment share the role of a tool:
# tokens of their own would shift the ids of all bytes, which trained models rely on.
CHAT_TEMPLATE = """\
{%- if tools -%}
    {{- '<|system|>tools: ' -}}
    {%- for tool in tools -%}
        {{- tool['function']['name'] ~ '(' -}}
        {%- set parameters = tool['function']['parameters'] or {} -%}
        {{- (parameters['properties'] or {}) | join(', ') -}}
        {{- ')' ~ ('' if loop.last else ', ') -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'tool' if message['role'] in ['function', 'environment'] else message['role'] -%}
    {%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception("message " ~ loop.index0 ~ " has the role '" ~ role ~ "'; this template knows \
system, user, assistant, tool, function and environment") -}}
    {%- endif -%}
    {{- '<|' ~ role ~ '|>' ~ message['content'] -}}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set arguments = call['function']['arguments'] -%}
        {{- '<call:' ~ call['function']['name'] ~ '>' -}}
        {{- (arguments if arguments is string else arguments | tojson) ~ '</call>' -}}
    {%- endfor -%}
    {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def byte_names() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary, in byte order.

    >>> byte_names()[ord("a")], byte_names()[ord(" ")]
    ('a', 'Ġ')
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    names, substitutes = [], 0
    for byte in range(256):
        if byte in printable:
            names.append(chr(byte))
        else:
            names.append(chr(256 + substitutes))
            substitutes += 1
    return names


def tokenizer_json() -> dict:
    """The content of `tokenizer.json`, the format of the `tokenizers` library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate([*SPECIALS, *byte_names()])},
            "merges": [],
        },
    }


def tokenizer_config() -> dict:
    """The content of `tokenizer_config.json`, the format of transformers."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "additional_special_tokens": [f"<|{role}|>" for role in ROLES],
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }


def main(folder: Path) -> None:
    """Write the three files into `folder`, which is made when it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer.json", tokenizer_json()), ("tokenizer_config.json", tokenizer_config())):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)

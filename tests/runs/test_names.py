"""File names for ids of any kind: plain, short, and never shared."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft.runs.directory import RunDirectory
from jaxft.runs.names import MAX_NAME_CHARACTERS, safe_name

ANY_TEXT = st.text(alphabet=st.characters(codec=None), max_size=200)
CAFE = "caf\u00e9"
STRANGE_IDS = [
    *("../../escaped", "../escaped", "/absolute", "..", ".", ".hidden", "a/b", "a\\b", "C:\\x", "a:b", "a b", "a_b"),
    *("nul", "NUL", "con.txt", "CON.txt", "com1", "dot.", "dot", "space ", "space", "\0", "a\0b", "line\nfeed"),
    *("x" * 100, "x" * 101, "x" * 300, "y" * 300, "emoji \N{GRINNING FACE}", "\ud800", "\udfff", "CAPITAL", "capital"),
    *(
        "",
        "-",
        "--overwrite",
        "~",
        "$HOME",
        "*",
        unicodedata.normalize("NFC", CAFE),
        unicodedata.normalize("NFD", CAFE),
    ),
    *("\N{LATIN SMALL LIGATURE FI}", "fi", "\u0130", "i", safe_name("a b"), safe_name("a b").upper(), safe_name("NUL")),
]


@given(ANY_TEXT)
def test_safe_names_are_short_plain_and_stable(text):
    name = safe_name(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*|-[0-9a-f]{12}", name)
    assert len(name) <= MAX_NAME_CHARACTERS and not name.endswith(".")
    assert name == safe_name(text)


def test_safe_names_do_not_collide_even_where_capitals_do_not_count():
    names = {safe_name(text).casefold() for text in STRANGE_IDS}
    assert len(names) == len(set(STRANGE_IDS)) == len(STRANGE_IDS)
    # Of a device of Windows there is no file, whatever follows the dot.
    assert not names & {"nul", "com1"} and not any(name.startswith("con.") for name in names)


@pytest.mark.parametrize("text", ["a_b", "x" * 100, "epoch_00007", "game-7", "console", "2024-01-01", "v1.2"])
def test_plain_names_are_kept(text):
    assert safe_name(text) == text


def test_files_of_any_id_are_written_inside_and_apart(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        for number, text in enumerate(STRANGE_IDS):
            directory.write_json(f"extra/{safe_name(text)}.json", {"id": text, "number": number})
            directory.append_jsonl(f"trajectories/{safe_name(text)}.jsonl", {"id": text})
        for number, text in enumerate(STRANGE_IDS):
            assert directory.read_json(f"extra/{safe_name(text)}.json") == {"id": text, "number": number}
        assert len(directory.log_sizes()) == len(STRANGE_IDS)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert {path.name for path in directory.path.iterdir()} == {"extra", "trajectories", "LOCK", "LOCK.holder"}

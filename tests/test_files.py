"""A disk that is full, for real: a limit on the size of files, and a file system of no room; names and manifests."""

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxft.errors import DiskFull, ManifestError
from jaxft.files import (
    MANIFEST,
    MAX_NAME_CHARACTERS,
    disk_errors,
    read_manifest,
    safe_name,
    verify_manifest,
    write_manifest,
)
from jaxft.harness.runtime import run_main
from jaxft.runs.directory import RunDirectory
from jaxft.runs.metrics import log_metrics


@contextlib.contextmanager
def limit(size):
    """Let this process write no file beyond so many bytes. Python ignores the signal for that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def directory(tmp_path):
    with RunDirectory.create(tmp_path / "run") as directory:
        yield directory


def test_a_row_that_does_not_fit_leaves_no_half_line_and_one_that_fits_follows(directory):
    for step in range(3):
        directory.append_jsonl("training_metrics.jsonl", {"step": step})
    with pytest.raises(DiskFull) as caught, limit(50):
        directory.append_jsonl("training_metrics.jsonl", {"step": 3, "text": "x" * 100})
    directory.append_jsonl("training_metrics.jsonl", {"step": 4})
    path, said = directory.path / "training_metrics.jsonl", str(caught.value)
    assert said.startswith(f"'{path}' cannot be written: File too large; ")
    assert int(said.split("; ")[1].split()[0]) > 0  # bytes that are free
    assert said.endswith("file-size limit (ulimit -f)")
    assert [json.loads(row)["step"] for row in path.read_text().splitlines()] == [0, 1, 2, 4]


def test_a_file_that_does_not_fit_leaves_the_old_one(directory):
    directory.write_json("result.json", {"old": 1})
    with pytest.raises(DiskFull), limit(50):
        directory.write_json("result.json", {"new": "x" * 100})
    assert {path.name for path in directory.path.iterdir()} == {"LOCK", "LOCK.holder", "result.json"}
    assert directory.read_json("result.json") == {"old": 1}


def test_a_run_ends_in_one_line_and_code_1(directory, capsys):
    async def main():
        with limit(3000):
            for step in range(1000):
                log_metrics(directory, step, {"loss": 0.5, "reward": 1.0}, {"seconds": 0.1})

    assert run_main(main) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("jaxft: error: '") and shown.err.count("\n") == 1
    assert "cannot be written: File too large; " in shown.err
    rows = (directory.path / "training_metrics.jsonl").read_text().splitlines()
    assert rows and [json.loads(row)["epoch"] for row in rows] == list(range(len(rows)))


def test_writers_that_are_not_pythons_own_are_understood(directory):
    """Weights and checkpoints are written by code in Rust and C++, which has exceptions of its own."""
    with pytest.raises(DiskFull) as caught, limit(5000), disk_errors(directory.path / "model"):
        save_file({"weights": np.zeros(10000)}, directory.path / "model.safetensors")
    assert type(caught.value.__cause__).__name__ == "SafetensorError"
    assert str(caught.value).startswith(f"'{directory.path / 'model'}' cannot be written: File too large")


UNTIL_FULL = """
import os, sys
from pathlib import Path
from jaxft.runs.directory import RunDirectory
from jaxft.errors import DiskFull

directory = RunDirectory.create(sys.argv[1])
path = directory.write_bytes("extra/weights", bytes(20000))
try:
    for step in range(10000):
        directory.append_jsonl("rows.jsonl", {"step": step})
except DiskFull as error:
    print(error)
try:
    directory.write_bytes("extra/weights", bytes(20001))
except DiskFull as error:
    print(error)
rows = (directory.path / "rows.jsonl").read_bytes()
last = b'{"step": %d}\\n' % (step - 1)
print(len(path.read_bytes()), sorted(os.listdir(path.parent)), rows.endswith(last))
path.unlink()
directory.append_jsonl("rows.jsonl", {"step": step})
"""


@pytest.mark.slow
def test_a_file_system_without_room(tmp_path):
    """A small one, in memory and in a name space of its own, where the machine lets us have one."""
    place = tmp_path / "small"
    place.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=64k none "$1"'
    if shutil.which("unshare") is None or subprocess.run([*alone, mount, "sh", place], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*alone, f'{mount} && exec "$2" -c "$3" "$1/run"', "sh", place, sys.executable, UNTIL_FULL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    appended, written, left = run.stdout.splitlines()
    said = "cannot be written: No space left on device; "
    assert appended.startswith(f"'{place / 'run' / 'rows.jsonl'}' {said}0 bytes are free")
    assert written.startswith(f"'{place / 'run' / 'extra' / 'weights'}' {said}")
    assert left == "20000 ['weights'] True"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_cause_is_looked_for(number, tmp_path):
    with pytest.raises(DiskFull) as caught, disk_errors(tmp_path / "not" / "there"):
        raise RuntimeError("the writer failed") from OSError(number, os.strerror(number))
    assert os.strerror(number) in str(caught.value) and caught.value.exit_code == 1
    with pytest.raises(DiskFull) as again, disk_errors(tmp_path):
        raise caught.value
    assert again.value is caught.value


def test_other_errors_pass(tmp_path):
    for error in (PermissionError(errno.EACCES, "no"), ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
            raise error
        assert caught.value is error


def test_a_directory_on_a_full_disk_is_no_bad_input(tmp_path, capsys):
    """It is a failed run, which can be repeated as it is when there is room."""
    RunDirectory.create(tmp_path / "run").close()

    async def main():
        with limit(1):
            RunDirectory.create(tmp_path / "run")

    assert run_main(main) == 1
    assert "LOCK.holder' cannot be written: File too large" in capsys.readouterr().err
    with RunDirectory.open(tmp_path / "run"):
        pass


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


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "made"
    for name, content in {"b": b"two", "a/inner": b"one", "empty": b"", f"a/{MANIFEST}": b"{}"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def rewrite(folder, **changes):
    """A manifest with other values and a sum that agrees, made without our code."""
    values = json.loads((folder / MANIFEST).read_text()) | changes
    del values["sha256"]
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    values["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n")


def test_a_manifest_lists_every_file_and_is_found_again(folder):
    assert write_manifest(folder, {"step": 3}) == folder / MANIFEST
    manifest = verify_manifest(folder)
    assert list(manifest) == ["format_version", "step", "files", "sha256"]
    assert (manifest["format_version"], manifest["step"]) == (1, 3)
    assert list(manifest["files"]) == ["a/inner", f"a/{MANIFEST}", "b", "empty"]
    assert manifest["files"]["b"] == {"sha256": hashlib.sha256(b"two").hexdigest(), "size": 3}
    assert manifest == read_manifest(folder) == verify_manifest(folder, only_listed=True)

    written = (folder / MANIFEST).read_bytes()
    rewrite(folder)
    assert (folder / MANIFEST).read_bytes() == written
    write_manifest(folder, {"step": 3})
    assert (folder / MANIFEST).read_bytes() == written


@pytest.mark.parametrize(
    "extra", [{"é \udc80": "\n"}, {"by": {10: 1.5, 9: 1e300}}, {"pair": (1, None)}, {"deep": [[{"files": {}}]]}]
)
def test_whatever_json_can_say_may_be_added(extra, folder):
    write_manifest(folder, extra)
    assert verify_manifest(folder).items() >= json.loads(json.dumps(extra)).items()


def test_what_cannot_be_said_is_refused_and_nothing_is_left(folder):
    with pytest.raises(ValueError, match=r"extra has the keys \['files'\], which the manifest uses itself"):
        write_manifest(folder, {"files": []})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_manifest(folder, {"score": float("nan")})
    (folder / "a" / "link").symlink_to("inner")
    os.mkfifo(folder / "pipe")
    with pytest.raises(
        ManifestError, match=r"made holds what no .* list: a/link: symbolic link; pipe: no regular file$"
    ):
        write_manifest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "empty", "pipe"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda folder: (folder / "b").write_bytes(b"twp"), r"b: other content \(sha256\)$"),
        (lambda folder: (folder / "b").write_bytes(b"tw"), "b: size 2 instead of 3$"),
        (lambda folder: (folder / "b").write_bytes(b""), "b: size 0 instead of 3$"),
        (lambda folder: (folder / "empty").write_bytes(b"\0"), "empty: size 1 instead of 0$"),
        (lambda folder: (folder / "b").unlink(), "b: missing$"),
        (lambda folder: (folder / "a").rename(folder / "c"), "a/inner: missing; a/manifest.json: missing"),
        (lambda folder: ((folder / "b").unlink(), (folder / "b").mkdir()), "b: no regular file$"),
        (lambda folder: ((folder / "b").unlink(), os.mkfifo(folder / "b")), "b: no regular file$"),
    ],
)
def test_a_changed_file_is_named_in_both_modes(change, fault, folder):
    write_manifest(folder)
    change(folder)
    for only_listed in (False, True):
        with pytest.raises(ManifestError, match=rf"made is not what its manifest.json says: {fault}"):
            verify_manifest(folder, only_listed=only_listed)


def test_all_bad_files_are_named(folder):
    write_manifest(folder)
    (folder / "a" / "inner").unlink()
    (folder / "b").write_bytes(b"2")
    (folder / "a" / "new").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"says: a/inner: missing; a/new: unexpected file; b: size 1 instead of 3$"):
        verify_manifest(folder)
    with pytest.raises(ManifestError, match=r"says: a/inner: missing; b: size 1 instead of 3$"):
        verify_manifest(folder, only_listed=True)


@pytest.mark.parametrize("name", ["b", "a", MANIFEST])
def test_links_are_faults_unless_others_may_add_to_the_folder(name, folder, tmp_path):
    write_manifest(folder)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ManifestError, match=f"says: {name}: symbolic link$"):
        verify_manifest(folder)
    verify_manifest(folder, only_listed=True)


def test_no_flipped_bit_of_the_manifest_passes(tmp_path):
    (tmp_path / "b").write_bytes(b"two")
    content = write_manifest(tmp_path).read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            (tmp_path / MANIFEST).write_bytes(changed)
            with pytest.raises(ManifestError, match=r"manifest.json is damaged"):
                read_manifest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"{}\n", b'"sha256"', b"[" * 10**5, b'{"n": 1e999}', b'{"n": NaN}', b"\xff\xfe"],
)
def test_other_content_of_the_manifest_is_refused(content, folder):
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(ManifestError, match=r"made/manifest.json is damaged"):
        verify_manifest(folder)


def test_a_cut_or_absent_manifest_is_named(folder):
    with pytest.raises(ManifestError, match=r"made has no manifest.json$"):
        verify_manifest(folder)
    content = write_manifest(folder).read_bytes()
    for length in range(0, len(content), 5):
        (folder / MANIFEST).write_bytes(content[:length])
        with pytest.raises(ManifestError, match=r"manifest.json is damaged"):
            read_manifest(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(ManifestError, match=r"manifest.json cannot be read: .*directory"):
        read_manifest(folder)


def test_a_newer_manifest_asks_for_a_newer_program(folder):
    write_manifest(folder)
    rewrite(folder, format_version=2, files=["in another way"])
    with pytest.raises(
        ManifestError, match=r"is of format_version 2, newer than this program knows \(1\): update jaxft"
    ):
        verify_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": None}, "is no manifest of jaxft: format_version is None; wanted 1"),
        ({"files": []}, "is no manifest of jaxft"),
        ({"files": {"../../x": {"sha256": "", "size": 0}}}, "lists '../../x', which is no file inside of"),
        ({"files": {"a/../../x": {"sha256": "", "size": 0}}}, "lists 'a/../../x', which is no file inside of"),
        ({"files": {"/etc/passwd": {"sha256": "", "size": 0}}}, "lists '/etc/passwd', which is no file inside of"),
        ({"files": {"": {"sha256": "", "size": 0}}}, "lists '', which is no file inside of"),
        ({"files": {"a//inner": {"sha256": "", "size": 0}}}, "lists 'a//inner', which is no file inside of"),
        ({"files": {MANIFEST: {"sha256": "", "size": 0}}}, "lists 'manifest.json', which is no file inside of"),
        ({"files": {"b": {"sha256": "", "size": "0"}}}, "of b; wanted an object of sha256 and size"),
        ({"files": {"b": None}}, "says None of b; wanted an object of sha256 and size"),
        ({"files": {"b\0": {"sha256": "", "size": 0}}}, r"b\0: cannot be read \(.*null"),
        ({"files": {"b" * 999: {"sha256": "", "size": 0}}}, r"bbb: cannot be read \(.*File name too long"),
    ],
)
def test_a_manifest_that_was_made_to_deceive_reads_nothing_outside(changes, message, folder):
    write_manifest(folder)
    rewrite(folder, **changes)
    with pytest.raises(ManifestError, match=message):
        verify_manifest(folder, only_listed=True)


def test_a_manifest_is_there_only_after_the_files_are_on_the_disk(folder, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace

    def recorded_sync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def recorded_replace(source, target):
        events.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write_manifest(folder)
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    assert {path.stat().st_ino for path in [folder, *folder.rglob("*")]} <= set(before)
    assert after == [folder.stat().st_ino]


def test_a_write_that_is_cut_off_leaves_no_manifest(folder, monkeypatch):
    def full(source, target):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            write_manifest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "empty"]

    (folder / f".{MANIFEST}.tmp").write_bytes(b"half of i")  # as a crash leaves it
    write_manifest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "empty", MANIFEST]
    verify_manifest(folder)

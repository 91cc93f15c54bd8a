"""Manifests: what was written is found again, and nothing that was changed passes."""

import hashlib
import json
import os

import pytest

from jaxft.models.manifest import MANIFEST, ManifestError, read_manifest, verify_manifest, write_manifest


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

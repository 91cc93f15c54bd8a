"""Checks a wheel and a source distribution of jaxft: files and metadata.

    python -m build --outdir dist && python scripts/check_package.py dist

The package in both must have the files that the repository has under `jaxft/`, no more and no fewer. The wheel has
nothing else; the source distribution has what building it takes, the changelog and the citation.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"}
BESIDE = PAGES | {"MANIFEST.in", "pyproject.toml", "PKG-INFO", "setup.cfg"}
"""Files of a source distribution that are not the package's; setuptools writes the last two."""


def repository_files(root: Path = ROOT) -> set[str]:
    """Return the paths of all files that git keeps, or would keep, from `root` on."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return {path for path in listed if path and (root / path).is_file()}


def wheel_faults(wheel: Path, root: Path = ROOT) -> list[str]:
    """Return one sentence for each file that the wheel lacks or should not have, and for its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(about))
    info = about.removesuffix("METADATA")
    files = {name for name in names if not name.startswith(info)}
    return [f"{wheel.name}: {fault}" for fault in [*_differences(files, root), *_metadata_faults(metadata, root)]]


def sdist_faults(sdist: Path, root: Path = ROOT) -> list[str]:
    """Return one sentence for each file that the source distribution lacks or should not have, and for its metadata."""
    top = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(top) for member in archive.getmembers() if member.isfile()}
        metadata = message_from_bytes(archive.extractfile(f"{top}PKG-INFO").read())
    files = {name for name in names - BESIDE if not name.startswith("jaxft.egg-info/")}
    missing = [f"lacks {name}" for name in sorted(BESIDE - names)]
    faults = [*missing, *_differences(files, root), *_metadata_faults(metadata, root)]
    return [f"{sdist.name}: {fault}" for fault in faults]


def _differences(files: set[str], root: Path) -> list[str]:
    expected = {path for path in repository_files(root) if path.startswith("jaxft/")}
    missing = [f"lacks {path}" for path in sorted(expected - files)]
    return missing + [f"has {path}, which is no file of the package" for path in sorted(files - expected)]


def _metadata_faults(metadata: Message, root: Path) -> list[str]:
    """Return what in the metadata differs from pyproject.toml, README and changelog."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = re.search(r'^__version__ = "(.*)"$', (root / "jaxft" / "__init__.py").read_text(), re.MULTILINE)[1]
    faults = []
    if metadata["Version"] != version:
        faults.append(f"is version {metadata['Version']}, where jaxft/__init__.py says {version}")
    if f"## {version}" not in (root / "CHANGELOG.md").read_text():
        faults.append(f"is version {version}, which has no section in CHANGELOG.md")
    if metadata.get_payload().strip() != (root / "README.md").read_text().strip():
        faults.append("has another description than README.md")
    extras = {name.replace("_", "-") for name in project["optional-dependencies"]}
    if extras != set(metadata.get_all("Provides-Extra", [])):
        faults.append(f"has the extras {metadata.get_all('Provides-Extra')}, where pyproject.toml has {sorted(extras)}")
    return faults


def main() -> int:
    """Check the one wheel and the one source distribution of a folder; return the exit code."""
    parser = argparse.ArgumentParser(description="Checks the files and the metadata of a wheel and an sdist.")
    parser.add_argument("folder", type=Path, help="the folder that python -m build has filled")
    folder = parser.parse_args().folder
    wheels, sdists = sorted(folder.glob("jaxft-*.whl")), sorted(folder.glob("jaxft-*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        print(f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists of jaxft: give one of each", file=sys.stderr)
        return 2
    faults = wheel_faults(wheels[0]) + sdist_faults(sdists[0])
    print("\n".join(faults) or f"{wheels[0].name} and {sdists[0].name} have what they should")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

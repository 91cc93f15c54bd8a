"""The environment of a run: versions, machine, command line and commit, with secrets masked."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jaxft.redaction import MASK, SHORTEST, hiding, redacted

PACKAGES = ("jaxft", "jax", "jaxlib", "flax", "optax", "transformers", "numpy")
_SECRET_NAME = re.compile(r"(?i)(^|[._-])(api[_-]?key|access[_-]?key|secret|password|token|authorization)$")
_SECRET_PARAMETER = re.compile(r"(?i)(^|[._-])(key|sig|signature|auth|pwd|passwd)$")
_URL = re.compile(r"(?i)\b(?P<scheme>[a-z][a-z0-9+.-]*)://(?:(?P<login>[^\s/?#]*)@)?(?P<rest>[^\s\"'<>]*)")
_PARAMETER = re.compile(r"[?&#;](?P<name>[^=&#;]*)=(?P<value>[^&#;]*)")
_SHORTEST_TOKEN = 20
"""Minimum number of characters of a login without password that counts as a token, not as a user name."""


def environment(devices: Sequence[str] = (), sources: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the content of `environment.json`: plain values, found without importing the packages.

    Args:
        devices: descriptions of the devices, passed in because asking jax would start it.
        sources: files and folders of the run, such as its configuration and its script.

    Returns:
        `versions` (None for a package that is not installed), `platform`, `cpu_count` (the cores that this process may
        use: XLA divides sums among them, which decides how they are rounded), `devices`, `command` (the command line,
        with the values of options that are named like secrets masked) and `git_commit`: the commit of the first of
        `sources` that lies in a repository, with `-dirty` after it when tracked files of that repository were changed;
        None when there is none.
    """
    commits = (_git_commit(source) for source in sources)
    return {
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "devices": list(devices),
        "command": masked_command(sys.argv),
        "git_commit": next((commit for commit in commits if commit is not None), None),
    }


def is_secret_name(name: str) -> bool:
    """Return True if a value of this name is a secret.

    >>> [is_secret_name(name) for name in ("OPENAI_API_KEY", "authorization", "max_tokens", "tokenizer")]
    [True, True, False, False]
    """
    return bool(_SECRET_NAME.search(name))


def secrets_in_urls(text: str) -> set[str]:
    """Return the passwords, tokens and keys in the URLs of a text, each alone and with the text before it in the URL.

    With that text, even a short secret is long enough to be masked. A login without a password counts as a token only
    over http, and is returned alone only if it is too long for a name.

    >>> sorted(secrets_in_urls("see https://me:pw@host/x?page=2&api_key=k7"))
    ['&api_key=k7', 'https://me:pw@', 'k7', 'pw']
    >>> sorted(secrets_in_urls("https://name@host and ssh://name@host"))
    ['https://name@']
    """
    found = set()
    for url in _URL.finditer(text):
        login, rest = url["login"] or "", url["rest"]
        _, colon, password = login.partition(":")
        if password or (login and not colon and url["scheme"].lower() in ("http", "https")):
            found |= {f"{url['scheme']}://{login}@", password}
            found |= {login} if not colon and len(login) >= _SHORTEST_TOKEN else set()
        for pair in _PARAMETER.finditer(rest):
            if pair["value"] and (is_secret_name(pair["name"]) or _SECRET_PARAMETER.search(pair["name"])):
                is_long = len(pair[0]) >= SHORTEST
                found |= {pair["value"], pair[0] if is_long else text[url.start() : url.start("rest") + pair.end()]}
    return {form for secret in found - {""} for form in (secret, unquote(secret))}


def secrets_of_environment() -> set[str]:
    """Return the values of environment variables named like secrets, and the secrets in URLs of all others."""
    named = {value for name, value in os.environ.items() if is_secret_name(name)}
    return named.union(*map(secrets_in_urls, os.environ.values()))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Replace the values of options named like secrets, and secrets in URLs, by `***` in command-line arguments.

    >>> masked_command(["--set", "llms.judge.api_key=sk-1", "-o", "llms.judge.token", "t", "--set", "a.tokens=3"])
    ['--set', 'llms.judge.api_key=***', '-o', 'llms.judge.token', '***', '--set', 'a.tokens=3']
    """
    masked: list[str] = []
    value_is_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = is_secret_name(name)
        if value_is_secret:
            masked.append(MASK)
        elif is_secret and equals:
            masked.append(f"{name}={MASK}")
        else:
            with hiding(secrets_in_urls(argument)):
                masked.append(redacted(argument))
        value_is_secret = is_secret and not equals and not value_is_secret
    return masked


def script() -> Path | None:
    """Return the script of this process; None for the command line of jaxft and for an interactive session."""
    path = Path(sys.argv[0]).resolve()
    is_own = path.is_relative_to(Path(__file__).parents[1])
    return path if path.suffix == ".py" and path.is_file() and not is_own else None


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(source: Path) -> str | None:
    folder = source if source.is_dir() else source.parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, no commit, or a disk too slow to wait for
        return None
    return described.stdout.strip()

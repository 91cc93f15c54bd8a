"""Limits of a server, the addresses that it listens on, and those by which it is reached."""

import ipaddress
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from jaxft.harness.config_types import ConfigModel, config_error
from jaxft.hosts.meeting import is_loopback
from jaxft.rollout.recorder import is_episode_token


class Limits(NamedTuple):
    """Limits of a server.

    Attributes:
        max_requests: requests that are answered at the same time; further ones get the status 429.
        head_seconds: time for the first line and the headers of a request.
        body_seconds: time for its body.
        write_seconds: time that a client may leave bytes of a response unread.
        drain_seconds: time that requests have to end when the server stops.
        max_body_bytes: size of a body.
    """

    max_requests: int = 256
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 2**24


def reachable_url(url: str, host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`, such as on `0.0.0.0`.

    >>> reachable_url("http://0.0.0.0:80", "0.0.0.0"), reachable_url("http://10.0.0.2:80", "10.0.0.2")
    ('http://127.0.0.1:80', 'http://10.0.0.2:80')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not address.is_unspecified:
        return url
    return url.replace("[::]", "[::1]") if address.version == 6 else url.replace("0.0.0.0", "127.0.0.1")


def _http_address(url: str) -> str:
    try:
        parsed = urlsplit(url)
        is_address = bool(parsed.hostname) and parsed.port != 0 and url.isprintable() and " " not in url
    except ValueError:  # of brackets or a port
        is_address = False
    if not is_address or parsed.scheme not in ("http", "https"):
        raise config_error("must begin with http:// or https://, and name a host, as in http://localhost:9000")
    return url


HTTPAddress = Annotated[str, AfterValidator(_http_address)]
"""An address of HTTP, with a host."""


class ServeConfig(ConfigModel):
    """An address under which a run serves its language models, by their names, to OpenAI's and Anthropic's clients."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address or name to listen on. Only this machine reaches 127.0.0.1; 0.0.0.0 stands for all networks. Every
    address that others reach needs an api_key."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free one, which is shown."""
    api_key: SecretStr | None = Field(default=None, min_length=1)
    """Key that clients must send. The base URL of an episode needs none, as it cannot be guessed. null: no key, on
    an address of this machine only."""
    url: Annotated[HTTPAddress, AfterValidator(lambda url: url.rstrip("/"))] | None = None
    """Address by which agents reach the server, as in http://trainer.example:8000, for the base URLs of episodes; on
    an address of this machine alone, clients may call it by this name, too. null: the one that it listens on."""

    def server_arguments(self) -> dict[str, Any]:
        """Return the arguments of `jaxft.serving.server.Server`.

        On an address of this machine, clients may also call the server by the name in `url`; elsewhere its key
        protects.
        """
        is_named = self.url is not None and is_loopback(self.host)
        return {
            "host": self.host,
            "port": self.port,
            "api_key": None if self.api_key is None else self.api_key.get_secret_value(),
            "allowed_hosts": [urlsplit(self.url).hostname or ""] if is_named else [],
        }

    @model_validator(mode="after")
    def _has_a_key(self) -> "ServeConfig":
        if self.api_key is None and not is_loopback(self.host):
            raise config_error(
                f"host {self.host} can be reached from other machines: set api_key, as in ${{SERVE_KEY}}"
            )
        return self

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        key = "" if api_key is None else api_key.get_secret_value()
        if not (key.isascii() and key == key.strip() and key.isprintable()):
            raise config_error("must be printable ASCII without spaces around it: no header carries anything else")
        if is_episode_token(key):
            raise config_error("begins as the keys of episodes do, and would be taken for one")
        return api_key

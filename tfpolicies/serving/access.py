"""Access control of a server: hosts, web pages, a token, and control of the models.

A web page can send requests to servers that only its reader's computer reaches, and by DNS
rebinding it can read their responses. Such requests name the page in `Origin` or `Sec-Fetch-Site`,
and after rebinding its host in `Host`. Browsers do not speak gRPC, which has no such headers.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tfpolicies.errors import RequestError, UsageError
from tfpolicies.serving.request_texts import quote
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import open_regular, read_content

_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HEALTH_PATHS = ("/v2/health/live", "/v2/health/ready")
_MAX_TOKEN_BYTES = 4096  # bytes of the file
_MAX_CACHED_HOSTS = 100
_BROWSER_HEADERS = {b"origin", b"sec-fetch-site"}
_SAME_SITE = (b"same-origin", b"none")  # `none`: the user typed the address


class AccessRules:
    """Rules by which a server accepts requests.

    Attributes:
        origins: of the web pages that may send requests and read the responses.
        control: whether requests may load and unload models.
        requires_token: whether requests need a token.

    Args:
        host: the server's address. On a loopback address, `Host` must be `localhost`, `127.0.0.1`,
            `[::1]` or one of `hosts`; on others it may be anything, or one of `hosts` if given.
        hosts: further values of `Host`, without a port.
        origins: such as `https://example.com`.
        control: as above.
        token: which requests must have as `Authorization: Bearer TOKEN`; "" for none.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        *,
        control: bool = False,
        token: str = "",
    ) -> None:
        self.origins, self.control = [origin.rstrip("/").lower() for origin in origins], control
        self.requires_token = bool(token)
        names = {name.lower() for name in hosts}
        if is_loopback(host):
            names |= {*_LOOPBACK_HOSTS, f"[{host}]" if ":" in host else host.lower()}
        elif names:
            names.add(host.lower())
        self._hosts = {name.encode() for name in names}
        self._origins = {origin.encode() for origin in self.origins}
        self._accepted_hosts: set[bytes] = set()  # values of `Host` that were accepted before
        self._authorization = f"Bearer {token}".encode() if token else b""

    def check_http(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Checks an HTTP request by its headers, whose names are in lower case."""
        host = headers.get(b"host", b"")
        if host in self._accepted_hosts and not _BROWSER_HEADERS & headers.keys():
            return
        origin = headers.get(b"origin", b"").lower()
        site = headers.get(b"sec-fetch-site", b"none")
        name = _without_port(host.lower())
        if self._hosts and host not in self._hosts and name not in self._hosts:
            raise RequestError(
                f"This server does not accept the Host {quote(host.decode('latin-1'))}. Send "
                f"{' or '.join(sorted(x.decode() for x in self._hosts))}, or start the server with "
                "--allowed-host.",
                403,
            )
        if origin and origin not in self._origins and origin.partition(b"://")[2] != host.lower():
            raise RequestError(
                f"Web pages of {quote(origin.decode('latin-1'))} may not use this server. Start it "
                "with --allowed-origin to let them.",
                403,
            )
        if site not in _SAME_SITE and origin not in self._origins:
            raise RequestError(
                "A web page of another origin sent this request. Start the server with "
                "--allowed-origin to let it.",
                403,
            )
        if self._authorization and path not in _HEALTH_PATHS:
            self.check_token(headers.get(b"authorization", b""))
        elif len(self._accepted_hosts) < _MAX_CACHED_HOSTS and not self._authorization:
            self._accepted_hosts.add(host)

    def check_token(self, authorization: bytes) -> None:
        if self._authorization and not hmac.compare_digest(authorization, self._authorization):
            raise RequestError(
                "This server requires a token. Send the header Authorization: Bearer TOKEN, with "
                "the content of its --token-file.",
                401,
            )

    def require_control(self) -> None:
        """Checks that requests may load and unload models."""
        if not self.control:
            raise RequestError(
                "This server does not load or unload models on request. Start it with --control.",
                403,
            )


def is_loopback(host: str) -> bool:
    """Whether only processes on this computer can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_token(path: Path, warn: Callable[[str], object]) -> str:
    """Reads a token from a file, without the newline at the end.

    Args:
        path: of a regular file.
        warn: called with a line of text if other users may read the file.
    """
    content, mode = read_secret("--token-file", path, _MAX_TOKEN_BYTES)
    token = content.strip()
    if not token or not all(32 < byte < 127 for byte in token):
        raise UsageError(
            f"--token-file {str(path)!r} must contain one word of at most {_MAX_TOKEN_BYTES} ASCII "
            "characters. Create one: openssl rand -hex 32 > FILE."
        )
    warn_if_shared(path, mode, warn)
    return token.decode()


def read_secret(option: str, path: Path, limit: int) -> tuple[bytes, int]:
    """Returns the content and the mode of the file of an option.

    Args:
        option: such as "--token-file".
        path: of a regular file.
        limit: the largest size in bytes.
    """
    try:
        with open_regular(resolve_path(path)) as file:
            return read_content(file, limit), os.fstat(file.fileno()).st_mode
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {str(path)!r} cannot be read: {error}.") from error


def warn_if_shared(path: Path, mode: int, warn: Callable[[str], object]) -> None:
    """Calls `warn` with a line of text if other users may read a file with this mode."""
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        warn(f"Other users may read {path}. Restrict it to yourself: chmod 600 {path}.")


def _without_port(host: bytes) -> bytes:
    """Strips the port; an IPv6 address keeps its brackets."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() and not name.endswith(b":") else host

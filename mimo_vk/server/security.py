"""Who may ask: the key, and the Host and Origin that keep a web page in some browser from using a local server."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from mimo_vk.server import pages
from mimo_vk.server.errors import ApiError

OPEN_PATHS = ("/health", "/metrics", *pages.files())  # no key is asked for: the page asks for it itself


@dataclass(frozen=True)
class Gate:
    """What is let in. key: None for no key. hosts, origins: allowed beside the machine's own ("*": any)."""

    key: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def check(self, path: str, headers: Headers) -> None:
        """ApiError 403 for a foreign Host or Origin, 401 for a wrong key."""
        self.check_host(headers.get("host"))
        self.check_origin(headers.get("origin"), headers.get("host"))
        if path not in OPEN_PATHS:
            self.check_key(headers.get("authorization"))

    def check_host(self, host: str | None) -> None:
        """A name that isn't ours may be a foreign page's, pointed at this address. An address can't be."""
        name = host_name(host or "")
        allowed = {"", "localhost", *(host_name(allowed) for allowed in self.hosts)}
        if name in allowed or "*" in self.hosts or _is_address(name) or name.endswith(".localhost"):
            return
        raise ApiError(
            403, f"the Host {_short(name)} is not allowed: start with --allow-host {_short(name)}", code="host"
        )

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """A page may ask if it came from this server, or from an allowed origin."""
        if origin is None or self.allows_origin(origin):
            return
        if urlsplit_or_none(origin) == (host or "").lower():
            return
        shown = _short(origin)
        raise ApiError(403, f"the Origin {shown} is not allowed: start with --allow-origin {shown}", code="origin")

    def allows_origin(self, origin: str) -> bool:
        """Whether an option names the origin."""
        return "*" in self.origins or origin.lower() in {allowed.lower().rstrip("/") for allowed in self.origins}

    def check_key(self, authorization: str | None) -> None:
        """The key, compared in a time that doesn't tell how much of it was right."""
        if self.key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1"), self.key.encode())
        if not (right and scheme.lower() == "bearer"):
            found = "no key was given" if not authorization else "the key is wrong"
            raise ApiError(
                401,
                f"{found}: expected the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") <= 1 else host


def urlsplit_or_none(origin: str) -> str | None:
    """The host and port of an origin."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme in ("http", "https") else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:100])

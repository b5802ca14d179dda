"""Who may use the server: API keys, and the host names and web pages by which a browser may come.

A web page can make the browser of anybody who looks at it send requests to addresses that only this browser can reach. Three things
keep it from using a server that listens on loopback without an API key: bodies must be `application/json`, which a page may not send
elsewhere without asking first (CORS); an `Origin` must be this machine or allowed; and `Host` must be a name that no outsider can
have (DNS rebinding: a page's own name that is made to mean 127.0.0.1, so that the browser thinks the server is where the page came from).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.server.errors import ApiError, shown
from headway.server.options import ServerOptions


class Keys:
    """The accepted API keys, as digests under a secret of this process: what is compared, and kept, says nothing of the keys."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def scope(self, given: bytes) -> str:
        """What keeps this key's requests apart from those of the others: "" where there is one key. Raises ApiError 401."""
        digest = self._digest(given)
        found = [hmac.compare_digest(digest, known) for known in self._digests]   # all of them: the time tells nothing
        if True not in found:
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest.hex() if len(self._digests) > 1 else ""

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=16).digest()


def install(app: FastAPI, options: ServerOptions) -> None:
    """Adds what the options ask for; the check of names and pages comes first."""
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
        )
    # A page does not know the key. On an address of the network, people come by names that the server cannot know.
    is_private = _listens_to_itself(options.host) and not options.api_key
    if is_private or options.allowed_hosts:
        origins = options.allowed_origins if is_private else ("*",)
        app.add_middleware(BrowserCheck, hosts=(options.host, *options.allowed_hosts), origins=origins)


class BrowserCheck:
    """Answers 403 to requests for a foreign `Host`, or from a foreign `Origin`, before anything else sees them.

    hosts    names besides those that no outsider can have; "*.name" includes all names below it, "*" is any
    origins  such as "https://example.com", besides pages of this machine; "*" is any
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self.app = app
        self.hosts = {host.lower() for host in hosts}
        self.origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["headers"])
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        for host in hosts:
            if not self._is_known(_name_of(host)):
                raise ApiError(
                    403, f"the Host header names {shown(host)}. Accepted are localhost, IP addresses and names without a dot; others with "
                    "--allowed-hosts, or any where an API key is required (--api-key)", code="host_not_allowed",
                )  # fmt: skip
        for origin in [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]:
            if not self._may_come_from(origin, hosts):
                raise ApiError(
                    403, f"the web page at {shown(origin)} may not use this server: allow it with --allowed-origins, or require an API key "
                    "(--api-key)", code="origin_not_allowed",
                )  # fmt: skip

    def _is_known(self, name: str) -> bool:
        if "*" in self.hosts or name in self.hosts or _is_loopback(name) or _is_address(name) or "." not in name:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self.hosts)

    def _may_come_from(self, origin: str, hosts: list[str]) -> bool:
        if "*" in self.origins or origin in self.origins:
            return True
        try:
            page = urlsplit(origin)
            return _is_loopback(page.hostname or "") or (page.netloc != "" and page.netloc in hosts)
        except ValueError:
            return False


def _listens_to_itself(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None)   # no host: all addresses
    except OSError:
        return False
    return all(_is_loopback(str(address[0])) for *_, address in found)


def _name_of(host: str) -> str:
    """ "localhost:8000" -> "localhost", "[::1]:8000" -> "::1" """
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    """An address has no name whose meaning somebody could change."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

"""``mimo-vk serve``: the HTTP API on an address, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn

from mimo_vk.errors import MimoError, UsageError
from mimo_vk.server.app import Context, make_app
from mimo_vk.server.front import Front
from mimo_vk.server.record import start_request_log
from mimo_vk.server.security import Gate, is_loopback
from mimo_vk.server.worker import Worker
from mimo_vk.settings import Settings, whole

log = logging.getLogger("mimo_vk")
GRACE_SECONDS = 5  # for answers that are on their way when the server is told to stop
IDLE_SECONDS = 30  # a connection without a request is closed after this


def main(settings: Settings, args: argparse.Namespace, on_ready: Callable[[str], None] | None = None) -> int:
    """Serve until told to stop; 0. on_ready: called with the web page's address once the model is loaded.

    Errors: UsageError for an address that can't be used; CheckpointError.
    """
    port = read_port(args.port)
    front = Front(settings, args.model_id)
    with listen(args.host, port) as listener:
        context = make_context(settings, front, args)
        if settings.log_level != "error" or settings.log_prompts:
            start_request_log()
        asyncio.run(Server(context, listener, on_ready).run())
    return 0


def make_context(settings: Settings, front: Front, args: argparse.Namespace) -> Context:
    """What the application works with, from the flags."""
    hosts = [*(args.allow_host or ()), args.host]
    if settings.api_key is None and not is_loopback(args.host):
        log.warning("anyone who reaches %s can use the model: --api-key asks for a key", args.host)
    return Context(
        front,
        Worker(replace(settings, api_key=None, serving=True)),
        Gate(settings.api_key, hosts, args.allow_origin or ()),
        log_prompts=settings.log_prompts,
    )


def read_port(text: str) -> int:
    """A port; 0 takes any that is free."""
    try:
        return whole(0, 65535)(text)
    except ValueError as error:
        raise UsageError(f"--port: expected {error}, found {text!r}") from None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. UsageError where the address can't be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(f"--host: {host!r} is no address of this machine: {str(reason).lower()}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(refusal(host, port, error)) from None
    return listener


def refusal(host: str, port: int, error: OSError) -> str:
    """Why an address can't be listened on, and what to do about it."""
    where = f"can't listen on {host}, port {port}: {(error.strerror or str(error)).lower()}"
    if error.errno == errno.EADDRINUSE:
        return f"--port: {where}; --port 0 takes one that is free"
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"--host: {where}: expected one of this machine's addresses, or 0.0.0.0 for all of them"
    return f"--port: {where}"


class Server(uvicorn.Server):
    """uvicorn on our socket, with the model's process started beside it and ended before it."""

    def __init__(
        self, context: Context, listener: socket.socket, on_ready: Callable[[str], None] | None = None
    ) -> None:
        config = uvicorn.Config(
            make_app(context),
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            loop="asyncio",
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(config)
        self._context, self._listener, self._on_ready = context, listener, on_ready
        self._failed: MimoError | None = None

    async def run(self) -> None:  # type: ignore[override]
        """Listen (answering 503 while the model is loaded), say so once it is, and serve to the end."""
        loading = asyncio.create_task(self._load())
        try:
            await self.serve(sockets=[self._listener])
        finally:
            await self._context.worker.stop()
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
        if self._failed is not None:
            raise self._failed

    async def _load(self) -> None:
        try:
            await self._context.worker.start()
        except MimoError as error:
            self._failed, self.should_exit = error, True
            return
        with contextlib.suppress(OSError):  # nobody reads it
            print(self.banner(), flush=True)
        if self._on_ready is not None:
            self._on_ready(self.address())

    def banner(self) -> str:
        """Model, address, how to stop."""
        address = self.address()
        return f"mimo-vk: {self._context.front.model_id} at {address}/v1, its web page at {address}/ - Ctrl-C stops it"

    def address(self) -> str:
        """Where this machine's own programs find the server."""
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what waits with 503 first, so that nothing keeps the server from ending."""
        await self._context.worker.stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Both signals end the server the same way, and the program's status is then its own."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _told_to_stop(self, number: int) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        if sys.stderr is not None and number == signal.SIGINT and sys.stderr.isatty():
            print("mimo-vk: stopping", file=sys.stderr, flush=True)
        self.should_exit = True

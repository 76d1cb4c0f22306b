"""``mimo-vk web``: serve, with the web page opened in a browser."""

from __future__ import annotations

import argparse
import threading
import webbrowser

from mimo_vk import serve
from mimo_vk.settings import Settings

TERMINAL_BROWSERS = ("elinks", "links", "lynx", "w3m", "www-browser")


def main(settings: Settings, args: argparse.Namespace) -> int:
    """Serve until told to stop; 0. Errors as for ``serve``."""
    return serve.main(settings, args, on_ready=show)


def show(url: str) -> None:
    """Open a browser where there is one with a window of its own; else the server's line says where the page is."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if getattr(browser, "basename", "") in TERMINAL_BROWSERS:  # it would take over the terminal that the server runs in
        return
    threading.Thread(target=browser.open, args=(url,), daemon=True).start()  # some wait until they are closed

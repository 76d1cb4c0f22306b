"""Pictures inside a request: data: URIs and base64, read strictly. Nothing is ever fetched."""

from __future__ import annotations

import binascii
import re

from mimo_vk.errors import ImageError

# RFC 2397, for pictures: any parameters, then base64. What the picture is, its content tells.
_HEAD = re.compile(r"data:image/[\w.+*-]+(;[\w.+-]+=[^;,\"]*)*;base64,", re.IGNORECASE | re.ASCII)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE | re.ASCII)


def picture_of(uri: str) -> bytes:
    """The file in a data: URI. Errors: ImageError for any other address, another type, or data that isn't base64."""
    head = _HEAD.match(uri)
    if head is None:
        scheme = _SCHEME.match(uri)
        if scheme is not None and scheme[1].lower() != "data":
            raise ImageError(f"{scheme[1][:20]}: addresses are not fetched, only data: URIs are taken")
        raise ImageError("expected data:image/TYPE;base64, and the picture's file")
    return from_base64(uri[head.end() :])


def from_base64(text: str) -> bytes:
    """The bytes of base64 as RFC 4648 has it: its alphabet alone, padded, no spare bits. Errors: ImageError."""
    try:
        written = text.encode("ascii")
        data = binascii.a2b_base64(written, strict_mode=True)
    except UnicodeEncodeError:
        raise ImageError("the data is not base64: it holds characters beyond ASCII") from None
    except binascii.Error as error:
        raise ImageError(f"the data is not base64: {str(error).lower()}") from None
    if not data:
        raise ImageError("the data is empty")
    if binascii.b2a_base64(data, newline=False) != written:
        raise ImageError("the data is not base64: its last character has bits that belong to no byte")
    return data

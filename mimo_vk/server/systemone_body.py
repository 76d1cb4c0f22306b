"""The body of a System One request: JSON, whole or the first part of a form, either of them compressed or not.

The public client ``typesafe-sdk`` 0.7.5 sends zstd from 1 KiB on (its ``_core/compression.py``) and a form where
pictures go along (``_core/endpoints.py``): the part ``request`` is the JSON, the others are named by its assets.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, NoReturn

from mimo_vk.server.body import LIMIT, json_fault
from mimo_vk.server.errors import ApiError
from mimo_vk.systemone_request import Fault, InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

MAX_FRAMES = 100  # what is behind a frame is copied for the next one: empty frames in 32 MiB would take hours
MAX_PARTS = 1000  # of a form: the JSON and its pictures. A quarter of a second
_WINDOW_LOG = 25  # a compressed body may refer back as far as the largest body is long


def decoded(headers: Mapping[str, str], data: bytes, limit: int = LIMIT) -> tuple[Any, dict[str, bytes]]:
    """The JSON of a body and a form's other parts by name. InvalidRequest where there is none; ApiError 413 and 415."""
    data = decompressed(headers.get("content-encoding", ""), data, limit)
    boundary = _boundary(headers.get("content-type", ""))
    if boundary is None:
        return parse_json(data), {}
    parts = list(split_form(data, boundary))
    if not parts or parts[0][0] != "request":
        _refuse("multipart_invalid", "the form's first part must be named request")
    pictures = dict(parts[1:])
    if len(pictures) < len(parts) - 1:
        _refuse("multipart_invalid", "the form has two parts of one name")
    return parse_json(parts[0][1]), pictures


def decompressed(encoding: str, data: bytes, limit: int = LIMIT) -> bytes:
    """The body without its Content-Encoding. ApiError 413 over ``limit`` bytes, 415 for an unknown encoding."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding != "zstd":
        raise ApiError(415, f"the Content-Encoding {encoding[:40]!r} is not supported, only zstd is", code="encoding")
    out = b""
    for _ in range(MAX_FRAMES):
        decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})
        try:
            out += decoder.decompress(data, limit + 1 - len(out))
        except zstd.ZstdError as error:
            _refuse("zstd_invalid", f"the body is not valid zstd: {error}")
        if len(out) > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
        if not decoder.eof:
            _refuse("zstd_invalid", "the body is not valid zstd: it ends too early")
        data = decoder.unused_data
        if not data:
            return out
    _refuse("zstd_invalid", f"the body has more than {MAX_FRAMES} zstd frames")


def split_form(data: bytes, boundary: bytes) -> Iterator[tuple[str, bytes]]:
    """The name and content of each part of a multipart/form-data body (RFC 7578)."""
    _, *parts = (b"\r\n" + data).split(b"\r\n--" + boundary)
    if len(parts) - 1 > MAX_PARTS:
        _refuse("multipart_invalid", f"the form has more than {MAX_PARTS} parts")
    for part in parts:
        if part.startswith(b"--"):
            return
        padding, line_end, part = part.partition(b"\r\n")
        head, gap, content = part.partition(b"\r\n\r\n")
        if padding.strip() or not (line_end and gap):
            break
        headers = BytesParser(policy=HTTP).parsebytes(head + b"\r\n\r\n", headersonly=True)
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            _refuse("multipart_invalid", "the form has a part without a name")
        yield name, content
    _refuse("multipart_invalid", "the form is cut off or its boundary is wrong")


def _boundary(content_type: str) -> bytes | None:
    """The boundary of a form, or None for any other type."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return None
    boundary = header.get_boundary()
    if not boundary or not boundary.isascii():
        _refuse("multipart_invalid", "the Content-Type has no boundary")
    return boundary.encode()


def parse_json(data: bytes) -> Any:
    """Bytes as JSON. InvalidRequest for anything else: two values of one name too, since one would be lost."""
    try:
        return json.loads(data, parse_constant=_no_number, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        _refuse("json_invalid", f"the body is not UTF-8: byte {error.start} is wrong")
    except ValueError as error:
        _refuse("json_invalid", json_fault(error, data))
    except RecursionError:
        _refuse("json_invalid", "the body is not valid JSON: nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        again = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has two values named {again[:40]!r}")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse(kind: str, message: str) -> NoReturn:
    raise InvalidRequest([Fault(("body",), message, kind)])

"""Which picture format some bytes are, by their first ones: names on disk are often wrong."""

from __future__ import annotations

SUPPORTED = {"PNG": "PNG", "JPEG": "JPEG", "WebP": "WEBP", "GIF": "GIF", "BMP": "BMP", "TIFF": "TIFF"}
"""The formats that are read, with Pillow's names for them."""

SUFFIXES = frozenset(
    (
        ".png",
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".heic",
        ".heif",
        ".avif",
        ".svg",
    )
)
"""Ends of names that mean a picture, also of formats that aren't read: better refused by name than sent as text."""

# Those that are read, and those that people try: the latter only to be called by name.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "PNG"),
    (0, b"\xff\xd8\xff", "JPEG"),
    (0, b"GIF87a", "GIF"),
    (0, b"GIF89a", "GIF"),
    (8, b"WEBP", "WebP"),  # behind RIFF and a length
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"II+\0", "TIFF"),  # BigTIFF
    (0, b"MM\0+", "TIFF"),
    (0, b"BM", "BMP"),
    (0, b"\0\0\x01\0", "ICO"),
    (0, b"%PDF-", "PDF"),
    (0, b"8BPS", "PSD"),
    (0, b"\0\0\0\x0cjP  \r\n", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL \r\n", "JPEG XL"),
    (0, b"qoif", "QOI"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"gimp xcf", "XCF"),
    (0, b"%!PS", "PostScript"),
    (0, b"DDS ", "DDS"),
    (0, b"\x1aE\xdf\xa3", "Matroska or WebM"),
    (0, b"PK\x03\x04", "ZIP"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"version https://git-lfs", "Git LFS pointer"),
)
_BRANDS = {
    b"avif": "AVIF", b"avis": "AVIF",
    b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF",
}  # fmt: skip


def sniff(data: bytes) -> str | None:
    """The format's name, one of ``SUPPORTED`` or another that is known; None for anything else."""
    for at, magic, name in _MAGIC:
        if data[at : at + len(magic)] == magic and (name != "WebP" or data[:4] == b"RIFF"):
            return name
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4 or QuickTime")
    if len(data) > 2 and data[:1] == b"P" and data[1:2] in b"1234567" and data[2:3].isspace():
        return "PNM"
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"<svg") or (start.startswith(b"<?xml") and b"<svg" in start):
        return "SVG"
    return "HTML" if start.startswith((b"<!doctype html", b"<html")) else None

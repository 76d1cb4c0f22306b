"""Lines that begin with a picture's path, as people type them and as file managers and terminals paste them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimo_vk.errors import ImageError, UsageError
from mimo_vk.picture_paths import MAX_FILE_BYTES, read_picture, split_line
from tests.picture_files import png

RED = png("red")
NAMES = ("photo.png", "my photo.png", "it's (2).JPG", "Straße 50%.png", "a\\b.png", "no suffix", "photo.png what.png")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Path:
    """The current folder and the home, with pictures in them and files that are none."""
    for name in NAMES:
        (tmp_path / name).write_bytes(RED)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "hello").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("photo.png", "photo.png"),
        ("./photo.png", "photo.png"),
        ("~/photo.png", "photo.png"),
        ("{folder}/photo.png", "photo.png"),
        ("my photo.png", "my photo.png"),
        ("./my photo.png", "my photo.png"),
        ("my\\ photo.png", "my photo.png"),
        ("'my photo.png'", "my photo.png"),
        ('"my photo.png"', "my photo.png"),
        ("'{folder}/my photo.png'", "my photo.png"),
        ("'it'\\''s (2).JPG'", "it's (2).JPG"),  # as a terminal pastes it
        ("it\\'s\\ \\(2\\).JPG", "it's (2).JPG"),
        ("it's (2).JPG", "it's (2).JPG"),
        ('"it\'s (2).JPG"', "it's (2).JPG"),
        ("file://{folder}/my%20photo.png", "my photo.png"),
        ("file://localhost{folder}/Stra%C3%9Fe%2050%25.png", "Straße 50%.png"),
        ("a\\b.png", "a\\b.png"),
        ("'a\\b.png'", "a\\b.png"),
        ("./no suffix", "no suffix"),  # told by its content
    ],
)
def test_a_line_that_begins_with_a_picture(folder: Path, written: str, name: str) -> None:
    written = written.format(folder=folder)
    for line, text in ((written, ""), (f"  {written}  what is written here? ", "what is written here?")):
        paths, rest = split_line(line)
        assert [path.resolve() for path in paths] == [folder / name]
        assert rest == text


def test_several_pictures(folder: Path) -> None:
    paths, rest = split_line("'my photo.png' ./photo.png  file:///etc/hosts compare")
    assert paths == [Path("my photo.png"), Path("photo.png")]
    assert rest == "file:///etc/hosts compare"


def test_the_longest_name_is_meant(folder: Path) -> None:
    assert split_line("photo.png what.png is it") == ([Path("photo.png what.png")], "is it")
    assert split_line("photo.png what is it") == ([Path("photo.png")], "what is it")


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "notes.txt says hello",
        "empty",
        "folder.png is a folder",
        "missing.png is a name",  # no path: words may look like that
        "what is in photo.png?",
        "'tis the season",
        '"quoted" words',
        '"',
        "it's",
        "./notes.txt",
        "file://elsewhere/x.png",
        "~nobody-at-all/x",
        "a" * 10_000,
        "word " * 2000,
        "a\0b.png",
        "/ 2",
    ],
)
def test_a_line_that_is_text(folder: Path, line: str) -> None:
    assert split_line(line) == ([], line.strip())


@pytest.mark.parametrize(
    "line", ["./gone.png what is it", "/gone.jpeg", "~/gone.webp", "'gone away.png' x", "file:///gone%20away.png"]
)
def test_a_path_that_leads_nowhere_is_named(folder: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"gone.*: no such file"):
        split_line(line)


def test_a_heic_file_is_sent_to_be_refused_by_name(folder: Path) -> None:
    (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic")
    assert split_line("phone.heic what is it")[0] == [Path("phone.heic")]


def test_files_are_read_whole_or_refused_by_name(folder: Path) -> None:
    assert read_picture(Path("photo.png")) == RED
    with pytest.raises(ImageError, match=r"gone\.png: no such file"):
        read_picture(Path("gone.png"))
    with pytest.raises(ImageError, match=r"folder\.png: not a file"):
        read_picture(Path("folder.png"))
    with pytest.raises(ImageError, match="/dev/zero: not a file"):
        read_picture(Path("/dev/zero"))
    with (folder / "large.png").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ImageError, match=r"large\.png: a picture's file may have 100 MiB at most"):
        read_picture(Path("large.png"))

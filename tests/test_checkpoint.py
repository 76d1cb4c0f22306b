"""Headers, the index and the files: broken one by one, each fault told with file, tensor and numbers."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimo_vk.checkpoint import Checkpoint, TensorInfo
from mimo_vk.errors import CheckpointError, ReadError
from mimo_vk.safetensors_header import HeaderFault, read_header
from tests.build import INDEX, Tensor, bytes_of, raw_file, write_index, write_shard, write_sharded

A: dict[str, Tensor] = {"a.x": ("F32", (2, 3), struct.pack("<6f", *range(6))), "a.y": ("U8", (5,), b"abcde")}
B: dict[str, Tensor] = {"b.x": ("BF16", (2,), b"\x80\x3f\x00\x40"), "b.y": ("U8", (0, 4), b"")}


def two_files(directory: Path) -> Path:
    return write_sharded(directory, {"one.safetensors": A, "two.safetensors": B})


def problems(directory: Path, *dirs: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory, dirs)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def header_problem(tmp_path: Path, header: object, data: bytes = b"", length: int | None = None) -> str:
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    lines = problems(tmp_path)
    assert all(line.startswith(f"{path}: ") for line in lines)
    return "\n".join(lines)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# What is read


def test_tensors_are_found_where_they_lie(tmp_path: Path):
    checkpoint = Checkpoint.open(two_files(tmp_path))
    assert sorted(checkpoint.tensors) == ["a.x", "a.y", "b.x", "b.y"]
    start = 8 + int.from_bytes((tmp_path / "one.safetensors").read_bytes()[:8], "little")
    assert checkpoint.tensors["a.y"] == TensorInfo("a.y", tmp_path / "one.safetensors", start + 24, 5, "U8", (5,))
    assert checkpoint.files == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    assert checkpoint.metadata == {"total_size": 33}


def test_mapped_and_read_give_the_stored_bytes(tmp_path: Path):
    checkpoint = Checkpoint.open(two_files(tmp_path))
    for take in (checkpoint.mapped, checkpoint.read):
        assert take("a.x").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert take("a.x").dtype == np.float32
        assert take("a.y").tobytes() == b"abcde"
        assert [hex(v) for v in take("b.x")] == ["0x3f80", "0x4000"]
        assert take("b.y").shape == (0, 4)
    assert not checkpoint.mapped("a.x").flags.writeable
    assert checkpoint.read("a.x").flags.writeable
    assert checkpoint.read_rows("a.x", 1, 2).tolist() == [[3, 4, 5]]


def test_mapped_shares_the_files_memory(tmp_path: Path):
    checkpoint = Checkpoint.open(two_files(tmp_path))
    assert np.shares_memory(checkpoint.mapped("a.y"), checkpoint.mapped("a.y"))
    assert not np.shares_memory(checkpoint.read("a.y"), checkpoint.mapped("a.y"))


@pytest.mark.parametrize("pad", range(4))
def test_any_alignment_of_the_data(tmp_path: Path, pad: int):
    """Where the header's length leaves a float32 unaligned, its bytes are still right, and the array is aligned."""
    header = json.dumps({"t": entry("F32", (2,), (0, 8))}).encode() + b" " * pad
    raw_file(tmp_path / "model.safetensors", header, struct.pack("<2f", 1.5, -2))
    array = Checkpoint.open(tmp_path).mapped("t")
    assert array.tolist() == [1.5, -2]
    assert array.flags.aligned
    assert not array.flags.writeable


def test_one_file_needs_no_index(tmp_path: Path):
    write_shard(tmp_path / "model.safetensors", A, metadata={"format": "pt"})
    assert sorted(Checkpoint.open(tmp_path).tensors) == ["a.x", "a.y"]


def test_further_directories_links_and_odd_names(tmp_path: Path):
    main, far, blobs = tmp_path / "main", tmp_path / "far", tmp_path / "blobs"
    far.mkdir()
    write_sharded(main, {"Ein Name mit ü.bin": A, "sub/two": B})
    (main / "sub/two").rename(far / "x")
    (far / "sub").mkdir()
    (far / "sub/two").symlink_to("../x")
    blobs.mkdir()
    (main / "Ein Name mit ü.bin").rename(blobs / "0123")
    (main / "Ein Name mit ü.bin").symlink_to(blobs / "0123")
    checkpoint = Checkpoint.open(main, [far])
    assert checkpoint.read("a.y").tobytes() == b"abcde"
    assert checkpoint.tensors["b.x"].path == far / "sub/two"


def test_optional_files_may_be_absent_or_broken(tmp_path: Path):
    write_sharded(tmp_path, {"one": A, "model_mtp.safetensors": B, "dflash/m": {"d": ("U8", (1,), b"x")}})
    (tmp_path / "model_mtp.safetensors").unlink()
    (tmp_path / "dflash/m").write_bytes(b"short")
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.tensors) == ["a.x", "a.y"]
    assert checkpoint.absent == {
        "b.x": "model_mtp.safetensors",
        "b.y": "model_mtp.safetensors",
        "d": "dflash/m",
    }
    assert len(checkpoint.notes) == 2


def test_optional_files_that_are_there_are_read(tmp_path: Path):
    write_sharded(tmp_path, {"one": A, "model_mtp.safetensors": B})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.optional == {"b.x", "b.y"}
    assert checkpoint.read("b.x").tolist() == [0x3F80, 0x4000]


def test_holes_of_a_sparse_file_are_known(tmp_path: Path):
    """4 MiB of which only 64 KiB in the middle was written; a file system without holes reports it all as data."""
    path, size = tmp_path / "model.safetensors", 4 << 20
    raw_file(path, {"t": entry(shape=[size], offsets=[0, size]), "u": entry(shape=[4], offsets=[size, size + 4])})
    start = path.stat().st_size
    os.truncate(path, start + size + 4)
    with path.open("r+b") as file:
        file.seek(start + (2 << 20))
        file.write(b"x" * 65536)
    checkpoint = Checkpoint.open(tmp_path)
    ranges = checkpoint.data_ranges("t")
    data = checkpoint.read("t")
    inside = np.zeros(size, bool)
    for begin, end in ranges:
        assert 0 <= begin < end <= size
        inside[begin:end] = True
    assert not data[~inside].any()
    assert inside[2 << 20 : (2 << 20) + 65536].all()
    assert ranges == sorted(ranges)
    if path.stat().st_blocks * 512 < size:  # the file system made holes
        assert inside.sum() < size // 2
    assert sum(end - begin for begin, end in checkpoint.data_ranges("u")) in (0, 4)


# Files that are missing, empty, short, unreadable


def test_all_bad_files_are_told_at_once_with_their_bytes(tmp_path: Path):
    files: dict[str, dict[str, Tensor]] = {f"s{i}": {f"m.{i}.w": ("U8", (100,), bytes_of(100))} for i in range(6)}
    write_sharded(tmp_path, files)
    size = (tmp_path / "s3").stat().st_size
    (tmp_path / "s0").unlink()
    (tmp_path / "s1").write_bytes(b"")
    (tmp_path / "s2").write_bytes(b"\x10\0\0")
    os.truncate(tmp_path / "s3", size - 7)
    (tmp_path / "s4").unlink()
    (tmp_path / "s4").mkdir()
    lines = problems(tmp_path)
    told = {Path(line.split(": ")[0]).name: line.split(": ", 1)[1] for line in lines}
    assert told["s0"] == "missing: 100 bytes missing (1 tensors by the index)"
    assert told["s1"].startswith("empty: found 0 bytes")
    assert told["s1"].endswith("100 bytes missing (1 tensors by the index)")
    assert told["s2"] == "short: expected at least 8 bytes, found 3: 5 missing"
    assert told["s3"] == f"short: expected {size} bytes, found {size - 7}: 7 missing"
    assert told["s4"].startswith("can't be read: not a regular file")
    assert len(lines) == 5


def test_an_empty_file_that_is_the_whole_model(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (line,) = problems(tmp_path)
    assert line.endswith("model.safetensors: empty: found 0 bytes, expected a safetensors header and data")


def test_a_missing_file_unlike_the_others_is_sized_by_the_index(tmp_path: Path):
    """total_size 233: b holds 4 bytes, c is short of its 200, and a's 29 bytes are like nothing else."""
    write_sharded(tmp_path, {"a": A, "b": B, "c": {"c.x": ("U8", (200,), bytes_of(200))}})
    (tmp_path / "a").unlink()
    os.truncate(tmp_path / "c", (tmp_path / "c").stat().st_size - 1)
    lines = problems(tmp_path)
    assert lines[1:] == [
        f"{tmp_path}/a: missing (2 tensors by the index)",
        f"{tmp_path}: 29 bytes missing with the file above, by total_size 233",
    ]


def test_a_header_cut_off_is_told(tmp_path: Path):
    two_files(tmp_path)
    path = tmp_path / "one.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, 20)
    assert problems(tmp_path) == [
        f"{path}: short: expected at least {8 + length} bytes (the header), found 20: {length - 12} missing"
    ]


def test_a_broken_link_names_its_target(tmp_path: Path):
    two_files(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "one.safetensors").symlink_to("../blobs/123")
    assert f"{tmp_path}/one.safetensors: missing: a link to ../blobs/123, which isn't there" in problems(tmp_path)[0]


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    two_files(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    os.mkfifo(tmp_path / "one.safetensors")
    assert "one.safetensors: can't be read: not a regular file" in problems(tmp_path)[0]


def test_an_unreadable_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    two_files(tmp_path)
    opened = Path.open

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "one.safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    assert f"{tmp_path}/one.safetensors: can't be read: Permission denied" in problems(tmp_path)[0]


def test_a_file_too_long_is_told(tmp_path: Path):
    two_files(tmp_path)
    path = tmp_path / "one.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"xyz")
    assert problems(tmp_path) == [f"{path}: too long: expected {size} bytes, found {size + 3}: 3 belong to no tensor"]


def test_missing_directories(tmp_path: Path):
    assert problems(tmp_path / "nowhere") == [f"{tmp_path}/nowhere: no such directory"]
    assert problems(two_files(tmp_path), tmp_path / "x", tmp_path / "y") == [
        f"{tmp_path}/x: no such directory",
        f"{tmp_path}/y: no such directory",
    ]


def test_a_file_cut_after_opening_is_a_read_error(tmp_path: Path):
    checkpoint = Checkpoint.open(two_files(tmp_path))
    info = checkpoint.tensors["a.y"]
    os.truncate(info.path, info.offset + 2)
    with pytest.raises(ReadError, match=rf"one.safetensors: a.y: expected 5 bytes at {info.offset}, found 2"):
        checkpoint.read("a.y")
    info.path.unlink()
    with pytest.raises(ReadError, match=r"one.safetensors: a.y: at \d+: No such file"):
        checkpoint.read("a.y")


# The index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "weight_map: expected an object"),
        ('{"weight_map": {}}', "weight_map: expected an object"),
        ('{"weight_map": {"a": 1}}', "weight_map: expected an object"),
        ('{"weight_map": {"a": "f"}, "metadata": 3}', "metadata: expected an object, found int"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / INDEX).write_text(text)
    (line,) = problems(tmp_path)
    assert line.startswith(f"{tmp_path}/{INDEX}: ")
    assert message in line


def test_no_index_and_no_file(tmp_path: Path):
    assert problems(tmp_path) == [
        f"{tmp_path}/{INDEX}: missing: expected it beside the shards (or one model.safetensors)"
    ]


def test_the_index_names_what_no_file_holds(tmp_path: Path):
    two_files(tmp_path)
    write_index(tmp_path, {"one.safetensors": [*A, "a.z"], "two.safetensors": list(B)})
    assert problems(tmp_path) == [
        f"{tmp_path}/one.safetensors: expected tensor a.z (by the index), which no file holds"
    ]


def test_the_index_puts_a_tensor_into_the_wrong_file(tmp_path: Path):
    two_files(tmp_path)
    write_index(tmp_path, {"one.safetensors": [*A, "b.x"], "two.safetensors": ["b.y"]})
    assert problems(tmp_path) == [
        f"{tmp_path}/one.safetensors: expected tensor b.x (by the index), which two.safetensors holds"
    ]


def test_tensors_the_index_leaves_out_are_there_too(tmp_path: Path):
    two_files(tmp_path)
    write_index(tmp_path, {"one.safetensors": ["a.x"], "two.safetensors": list(B)})
    assert "a.y" in Checkpoint.open(tmp_path).tensors


def test_a_tensor_in_two_files(tmp_path: Path):
    write_sharded(tmp_path, {"one": A, "two": B | {"a.y": A["a.y"]}})
    assert f"{tmp_path}/two: tensor a.y: also in {tmp_path}/one: expected in one file" in problems(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../one.safetensors", "a/../../b", "x\ny", ""])
def test_the_index_can_not_lead_out_of_the_directory(tmp_path: Path, name: str):
    two_files(tmp_path)
    write_index(tmp_path, {name: ["x"], "one.safetensors": list(A), "two.safetensors": list(B)})
    (line,) = problems(tmp_path)
    assert f"{INDEX}: weight_map: not a file name: " in line


def test_a_long_list_of_faults_is_cut_with_a_count(tmp_path: Path):
    two_files(tmp_path)
    write_index(tmp_path, {"one.safetensors": [f"n{i}" for i in range(50)], "two.safetensors": list(B)})
    lines = problems(tmp_path)
    assert len(lines) == 21
    assert lines[-1] == "... and 30 more like these, 50 in all"


def test_a_file_copied_under_a_second_name_is_told_with_a_count(tmp_path: Path):
    many: dict[str, Tensor] = {f"t{i:02}": ("U8", (1,), b"x") for i in range(30)}
    write_sharded(tmp_path, {"one": many})
    (tmp_path / "two").write_bytes((tmp_path / "one").read_bytes())
    write_index(tmp_path, {"one": [*many][1:], "two": [*many][:1]})
    lines = problems(tmp_path)
    assert lines[0] == f"{tmp_path}/two: tensor t00: also in {tmp_path}/one: expected in one file"
    assert lines[20] == "... and 10 more like these, 30 in all"


# Headers


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 2**63, 2**64 - 1])
def test_header_length_is_bounded(tmp_path: Path, length: int):
    text = header_problem(tmp_path, b"{}", length=length)
    assert f"a header length of 2 to 100000000 expected, found {length}" in text


@pytest.mark.parametrize(
    "header", [b"not json", b"\xff\xff", b"[" * 200_000, b'{"a": 1', json.dumps({"a": entry()}).encode("utf-16")]
)
def test_the_header_is_json(tmp_path: Path, header: bytes):
    assert "the header isn't JSON: " in header_problem(tmp_path, header)


def test_the_header_is_an_object(tmp_path: Path):
    assert "the header isn't a JSON object but list" in header_problem(tmp_path, [])


@pytest.mark.parametrize("metadata", [3, [], {"a": 1}, None])
def test_metadata_is_strings(tmp_path: Path, metadata: object):
    assert "__metadata__: expected an object of strings" in header_problem(tmp_path, {"__metadata__": metadata})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (3, "expected an object with dtype, shape and data_offsets, found int"),
        ({}, "dtype: expected one of "),
        (entry("Q8"), "found Q8"),
        (entry(8), "found 8"),
        (entry(["U8"]), "found ['U8']"),
        (entry(shape="4"), "shape: expected a list of sizes, found 4"),
        (entry(shape=[4.0]), "shape: expected a list of sizes, found [4.0]"),
        (entry(shape=[-4]), "shape: expected a list of sizes, found [-4]"),
        (entry(shape=[True]), "shape: expected a list of sizes, found [True]"),
        (entry(shape=None), "shape: expected a list of sizes, found None"),
        (entry(shape=[2**40, 2**40]), "isn't a whole number of bytes under 2^57"),
        (entry(shape=[2**59] * 1000), "isn't a whole number of bytes under 2^57"),
        (entry("F4", shape=[3], offsets=[0, 2]), "isn't a whole number of bytes"),
        (entry(offsets=[0]), "data_offsets: expected two offsets, found [0]"),
        (entry(offsets=[0, 4, 4]), "data_offsets: expected two offsets, found [0, 4, 4]"),
        (entry(offsets=[0, 4.0]), "data_offsets: expected two offsets, found [0, 4.0]"),
        (entry(offsets=[False, 4]), "data_offsets: expected two offsets, found [False, 4]"),
        (entry(offsets=[-4, 0]), "data_offsets: expected two offsets, found [-4, 0]"),
        (entry(offsets=[0, 2**70]), "data_offsets: expected two offsets"),
        (entry(offsets=[4, 0]), "U8 [4] takes 4 bytes, found -4 (4 to 0)"),
        (entry("F32"), "F32 [4] takes 16 bytes, found 4 (0 to 4)"),
    ],
)
def test_a_faulty_entry_is_named(tmp_path: Path, bad: object, message: str):
    text = header_problem(tmp_path, {"good": entry(), "bad": bad}, b"abcd")
    (line,) = text.splitlines()
    assert "tensor bad: " in line
    assert message in line


def test_overlaps_and_holes(tmp_path: Path):
    overlap = header_problem(tmp_path, {"a": entry(), "b": entry(offsets=[2, 6])}, b"abcdef")
    assert "tensor b: overlaps the tensor before it: expected to begin at 4, found 2" in overlap
    hole = header_problem(tmp_path, {"a": entry(), "b": entry(offsets=[6, 10])}, b"abcdefghij")
    assert "tensor b: leaves a hole before it: expected to begin at 4, found 6" in hole
    late = header_problem(tmp_path, {"a": entry(offsets=[1, 5])}, b"abcde")
    assert "tensor a: leaves a hole before it: expected to begin at 0, found 1" in late


def test_order_in_the_header_is_free(tmp_path: Path):
    header = {"b": entry(offsets=[4, 8]), "none": entry(shape=[0], offsets=[4, 4]), "a": entry()}
    raw_file(tmp_path / "model.safetensors", header, b"abcdefgh")
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.read("a").tobytes(), checkpoint.read("b").tobytes()) == (b"abcd", b"efgh")


def test_a_name_twice_in_one_header(tmp_path: Path):
    one = json.dumps(entry())
    text = header_problem(tmp_path, f'{{"a": {one}, "b": {one}, "a": {one}}}'.encode(), b"abcd")
    assert "tensor a: named twice in the header" in text


def test_names_are_printed_on_one_line(tmp_path: Path):
    text = header_problem(tmp_path, {"a\nb\ud800": entry("?")}, b"abcd")
    (line,) = text.splitlines()
    assert "tensor 'a\\nb\\ud800': dtype" in line


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F4", "nope"]) | values,
        "shape": st.lists(st.integers(-1, 2**62), max_size=4) | values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | values,
    }
)


def parse(directory: Path, content: bytes) -> None:
    """Either a table whose every tensor lies in the file, or a fault."""
    path = directory / "model.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except HeaderFault as fault:
        assert fault.lines and all(line and "\n" not in line for line in fault.lines)
        with pytest.raises(CheckpointError):
            Checkpoint.open(directory)
        return
    for info in header.tensors:
        assert 8 <= info.offset <= info.offset + info.nbytes <= len(content)


no_reset = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@no_reset
@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes):
    parse(tmp_path, content)


@no_reset
@given(header=st.binary(max_size=80), data=st.binary(max_size=20))
def test_any_header_bytes_are_read_or_refused(tmp_path: Path, header: bytes, data: bytes):
    parse(tmp_path, len(header).to_bytes(8, "little") + header + data)


@no_reset
@given(header=st.dictionaries(st.text(max_size=6), entries | values, max_size=5), data=st.binary(max_size=60))
def test_any_json_is_read_or_refused(tmp_path: Path, header: dict[str, object], data: bytes):
    text = json.dumps(header).encode()
    parse(tmp_path, len(text).to_bytes(8, "little") + text + data)


@no_reset
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_changed_byte_is_read_or_refused(tmp_path: Path, place: int, value: int):
    content = bytearray(write_shard(tmp_path / "model.safetensors", A | B).read_bytes())
    content[place % len(content)] = value
    parse(tmp_path, bytes(content))


def test_many_tensors_cost_little(tmp_path: Path):
    """A release has 160,000 tensors: a quarter of it, in processor time, with room for a slow machine."""
    for shard in range(20):
        names = [f"model.layers.{shard}.mlp.experts.{e}.gate_proj.weight" for e in range(2000)]
        header = {name: entry(shape=[2, 2], offsets=[4 * i, 4 * i + 4]) for i, name in enumerate(names)}
        raw_file(tmp_path / f"s{shard}", header, bytes(8000))
    where = {f"s{s}": [f"model.layers.{s}.mlp.experts.{e}.gate_proj.weight" for e in range(2000)] for s in range(20)}
    write_index(tmp_path, where)
    began = time.process_time()
    assert len(Checkpoint.open(tmp_path).tensors) == 40_000
    assert time.process_time() - began < 3

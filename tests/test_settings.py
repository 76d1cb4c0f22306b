"""The registry: defaults, a flag over its variable, bad values named, unknown variables named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_vk.errors import UsageError
from mimo_vk.machine import cgroup_memory, cpu_quota, physical_cores
from mimo_vk.settings import SHARED, Settings, number, resolve, validation_requested, whole


def settings(environ: dict[str, str] | None = None, **flags: object) -> Settings:
    return resolve(flags, environ or {})[0]


def test_defaults_are_the_documented_ones() -> None:
    found = settings()
    assert (found.ctx, found.chunk, found.dense_bits, found.read_threads, found.tier_rate) == (8192, 64, 0, 8, 8)
    assert (found.device, found.dense, found.cpu, found.direct, found.think) == ("auto", "auto", False, True, False)
    assert (found.model, found.dirs, found.cap, found.ram, found.tier_gb) == (None, (), None, None, None)
    assert (found.temperature, found.top_p, found.seed, found.pin_slots) == (None, None, None, 4)
    assert found.threads == physical_cores() >= 1


def test_every_documented_variable_is_read() -> None:
    environ = {
        "MIMO_MODEL": "/m", "MIMO_DIRS": "/a:/b", "MIMO_CAP": "9", "MIMO_CTX": "100", "MIMO_CHUNK": "7",
        "MIMO_DENSE_BITS": "8", "MIMO_DEVICE": "1", "MIMO_VK_DENSE": "cpu", "MIMO_VK_TIER_GB": "2.5",
        "MIMO_VK_TIER_RATE": "3", "MIMO_THREADS": "5", "MIMO_READ_THREADS": "6", "MIMO_DIRECT": "0",
        "MIMO_LOG": "debug", "MIMO_BACKEND": "numpy", "MIMO_PIN_SLOTS": "2",
        "MIMO_API_KEY": "k", "MIMO_MAX_IMAGE_TOKENS": "99", "MIMO_LOG_PROMPTS": "1",
        "MIMO_VISION_SINK": "denominator",
    }  # fmt: skip
    found, warnings = resolve({}, environ)
    assert warnings == []
    assert found == Settings(
        model=Path("/m"), dirs=(Path("/a"), Path("/b")), cap=9, ctx=100, chunk=7, dense_bits=8, device="1", dense="cpu",
        tier_gb=2.5, tier_rate=3, threads=5, read_threads=6, direct=False, log_level="debug", backend="numpy",
        pin_slots=2, api_key="k", max_image_tokens=99, log_prompts=True,
        vision_sink="denominator",
    )  # fmt: skip
    assert set(environ) == {row.variable for row in SHARED if row.variable}


def test_a_flag_beats_its_variable() -> None:
    environ = {"MIMO_CTX": "100", "MIMO_DIRECT": "1", "MIMO_MODEL": "/variable"}
    found = settings(environ, ctx="200", direct=True, model="/flag")
    assert (found.ctx, found.direct, found.model) == (200, False, Path("/flag"))


def test_an_empty_variable_counts_as_absent() -> None:
    assert settings({"MIMO_CAP": "", "MIMO_DIRECT": ""}) == settings()


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--cap", "cap", "0"),
        ("--cap", "cap", "1.5"),
        ("--ram", "ram", "0"),
        ("--ram", "ram", "nan"),
        ("--ctx", "ctx", "-1"),
        ("--chunk", "chunk", "many"),
        ("--dense-bits", "dense_bits", "4"),
        ("--dense", "dense", "gpu"),
        ("--tier-gb", "tier_gb", "-0.5"),
        ("--threads", "threads", "0"),
        ("--temperature", "temperature", "-0.1"),
        ("--top-p", "top_p", "0"),
        ("--top-p", "top_p", "1.01"),
        ("--seed", "seed", "-1"),
        ("--log-level", "log_level", "loud"),
        ("--model", "model", " "),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(flag: str, field: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: expected .*, found {re.escape(repr(value))}$") as caught:
        resolve({field: value}, {})
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_bad_variable_is_named_and_all_problems_are_told() -> None:
    with pytest.raises(UsageError) as caught:
        settings({"MIMO_CTX": "x", "MIMO_CAP": "3", "MIMO_DIRECT": "perhaps"}, chunk="0")
    lines = str(caught.value).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["--chunk", "MIMO_CTX", "MIMO_DIRECT"]


def test_a_flag_makes_its_bad_variable_harmless() -> None:
    assert settings({"MIMO_CTX": "x"}, ctx="5").ctx == 5


def test_unknown_variables_are_named_with_what_was_meant() -> None:
    _, warnings = resolve({}, {"MIMO_THREAD": "2", "MIMO_ZZZZZZ": "1", "HOME": "/", "MIMOSA": "1"})
    assert warnings == [
        "unknown variable MIMO_THREAD is ignored; MIMO_THREADS was meant?",
        "unknown variable MIMO_ZZZZZZ is ignored",
    ]


def test_cpu_and_device_cpu_are_the_same() -> None:
    assert (
        settings(cpu=True)
        == settings(device="cpu")
        == settings({"MIMO_DEVICE": "cpu"})
        == settings({"MIMO_DEVICE": "1"}, cpu=True)
    )
    assert settings(cpu=True).device == "cpu"
    assert not settings({"MIMO_DEVICE": "cpu"}, device="0").cpu
    with pytest.raises(UsageError, match="--cpu and --device 0"):
        settings(cpu=True, device="0")
    with pytest.raises(UsageError, match="--cpu and --dense device"):
        settings(cpu=True, dense="device")
    assert settings({"MIMO_VK_DENSE": "device"}, cpu=True).cpu  # a variable is no contradiction


@given(st.integers(-50, 150))
def test_whole_numbers_keep_to_their_range(value: int) -> None:
    read = whole(1, 99)
    if 1 <= value <= 99:
        assert read(str(value)) == value
    else:
        with pytest.raises(ValueError, match="from 1 to 99"):
            read(str(value))


@pytest.mark.parametrize("text", ["", " 1", "1_0", "0x1", "1e3", "\u0663", "9" * 30])
def test_whole_numbers_are_plain_digits(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        whole(0)(text)


def test_numbers_exclude_the_low_end_where_asked() -> None:
    assert number(0)("0") == 0.0
    assert number(0, 1, above=True)("1") == 1.0
    for bad in ("0", "inf", "nan", "one", "1.5"):
        with pytest.raises(ValueError, match="a number above 0 and at most 1"):
            number(0, 1, above=True)(bad)


def test_the_validation_layer_is_on_only_when_named() -> None:
    assert not validation_requested({})
    assert not validation_requested({"VK_INSTANCE_LAYERS": "VK_LAYER_MESA_overlay"})
    assert validation_requested({"VK_INSTANCE_LAYERS": "VK_LAYER_MESA_overlay:VK_LAYER_KHRONOS_validation"})


def test_the_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    inner, outer, old = tmp_path / "inner", tmp_path / "outer", tmp_path / "old"
    for directory, names, limit, used in (
        (inner, ("memory.max", "memory.current"), "max", "500"),
        (outer, ("memory.max", "memory.current"), "4000", "1500"),
        (old, ("memory.limit_in_bytes", "memory.usage_in_bytes"), "9223372036854771712", "10"),
    ):
        directory.mkdir()
        (directory / names[0]).write_text(limit + "\n")
        (directory / names[1]).write_text(used + "\n")
    (outer / "memory.stat").write_text("anon 900\ninactive_file 600\n")
    assert cgroup_memory([inner, outer, old]) == (4000, 900)
    assert cgroup_memory([inner, old]) is None


def test_cpu_quotas_of_both_kinds_of_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) == 0.0
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == 2.0

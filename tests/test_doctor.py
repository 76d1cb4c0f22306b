"""doctor: each kind of line, from reports made by hand, from real child processes, and from checkpoints with faults."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mimo_vk import doctor, probe
from mimo_vk.disk_speed import measure
from mimo_vk.errors import ReadError
from mimo_vk.settings import Settings
from mimo_vk.vulkan import listing
from mimo_vk.vulkan.subnormals import flushes
from tests.vulkan_device import software_device

SUMMARY = """
Instance Layers: count = 1
--------------------------
VK_LAYER_KHRONOS_validation Khronos Validation Layer     1.3.239  version 1

Devices:
========
GPU0:
\tapiVersion         = 1.3.277
\tdeviceType         = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU
\tdeviceName         = NVIDIA H200
\tdriverName         = NVIDIA
\tdriverInfo         = 550.54
GPU12:
\tapiVersion         = 1.3.230
\tdeviceType         = PHYSICAL_DEVICE_TYPE_CPU
\tdeviceName         = llvmpipe (LLVM 15.0.6, 256 bits)
\tdriverName         = llvmpipe
"""


def lines(model: Path | None = None, **changes: object) -> list[str]:
    return [str(finding) for finding in doctor.findings(replace(Settings(model=model, cpu=True), **changes))]  # type: ignore[arg-type]


def test_devices_are_read_from_the_summary() -> None:
    assert probe.parse_devices(SUMMARY) == (
        probe.Device(0, "NVIDIA H200", "discrete GPU", "NVIDIA 550.54", "1.3.277"),
        probe.Device(12, "llvmpipe (LLVM 15.0.6, 256 bits)", "CPU", "llvmpipe", "1.3.230"),
    )
    assert probe.parse_devices("Cannot create Vulkan instance") == ()


def test_a_childs_crash_exit_and_hang_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    python = [sys.executable, "-c"]
    assert probe.run_child([*python, "print('fine')"]) == probe.Child("fine\n", "")
    assert probe.run_child([*python, "import os; os.abort()"]).trouble == "it crashed (SIGABRT)"
    assert probe.run_child([*python, "raise SystemExit('no luck')"]).trouble == "exit status 1: no luck"
    assert probe.run_child(["/nonexistent/program"]).trouble == "No such file or directory"
    assert probe.run_child([*python, "import time; time.sleep(20)"], 0.3).trouble == "no answer in 0 s"
    monkeypatch.setattr(probe, "SECONDS", 0.2)
    assert probe.run_child([*python, "import time; time.sleep(20)"]).trouble == "no answer in 0 s"


def test_without_a_driver_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = "exit status 1: vkCreateInstance failed with ERROR_INCOMPATIBLE_DRIVER"
    monkeypatch.setattr(probe.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(probe, "run_child", lambda command: probe.Child("", trouble))
    found = list(doctor.check_vulkan("auto"))
    assert [(f.name, f.ok, f.broken) for f in found] == [
        ("vulkan", False, False),
        ("validation layer", True, False),
        ("kp", False, False),
    ]
    assert str(found[0]).startswith("--  vulkan: no driver is installed (sudo apt-get install -y mesa-vulkan-drivers)")


def test_a_wrong_round_trip_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = probe.parse_devices(SUMMARY)
    monkeypatch.setattr(probe, "kp_version", lambda: probe.Child("0.9.0\n", ""))
    monkeypatch.setattr(probe, "run_child", lambda command: probe.Child("differs: [0. 0. 0. 0.]\n", ""))
    found = doctor.check_kp(devices)
    assert (found.ok, found.broken) == (False, True)
    assert "what came back differs: [0. 0. 0. 0.]" in found.text
    monkeypatch.setattr(probe, "run_child", lambda command: probe.Child("same\n", ""))
    assert doctor.check_kp(devices) == doctor.Finding("kp", True, "0.9.0 imports, a round trip on device 0 is right")


def test_the_device_that_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The software device: not by itself; named, its arithmetic is tried; and what keeps a device from being used."""
    named = software_device()
    assert doctor.check_device("auto", True) == doctor.Finding(
        "device", True, "--device auto takes none: there is no GPU, and a CPU driver must be named"
    )
    said = f"--device llvmpipe takes {named.describe()}; its results have the CPU's bits"
    but = "; for dense layers it is not used, as it takes subnormal floats for zero"
    assert doctor.check_device("llvmpipe", True) == doctor.Finding("device", True, said + but * flushes(named))
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "try_device", lambda info: True)
        assert doctor.check_device("llvmpipe", True) == doctor.Finding("device", True, said + but)
    assert doctor.check_device("llvmpipe", False).text.endswith("; without kp it is not used")
    absent = doctor.check_device("radeon", True)
    assert absent.broken and "--device radeon: no such Vulkan device" in absent.text
    poor = replace(named, subgroup_size=0)
    monkeypatch.setattr(listing, "list_devices", lambda: listing.Listing((poor,), ""))
    found = doctor.check_device("0", True)
    assert not found.ok and found.text.endswith("it is not used: its compute shaders have no subgroup broadcast")


def test_a_whole_checkpoint(tiny_checkpoint: Path) -> None:
    found = lines(tiny_checkpoint)
    size = sum(path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors"))
    (whole,) = [line for line in found if line.startswith("ok  checkpoint: ")]
    assert f"{tiny_checkpoint}: complete, " in whole
    shown = float(whole.split()[-2])
    assert whole.endswith(" MB") and 0.9 * size < shown * 1e6 <= size
    assert found[-1].startswith("ok  disk: ")
    assert "ok  vulkan: not looked at: --cpu" in found
    assert [line for line in found if line.startswith("--")] == []


def test_what_is_missing_is_named(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, copy)
    shards = sorted(copy.glob("*.safetensors"))
    shards[0].unlink()
    os.truncate(shards[1], shards[1].stat().st_size - 100)
    (copy / "tokenizer.json").unlink()
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").unlink()
    (copy / "preprocessor_config.json").unlink()
    assert doctor.main(Settings(model=copy, cpu=True), None) == 1  # type: ignore[arg-type]
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--")]
    assert any(line.startswith("--  checkpoint: ") and shards[0].name in line for line in bad)
    assert any(line.startswith("--  checkpoint: ") and shards[1].name in line and "100" in line for line in bad)
    assert any(line.startswith("--  tokenizer: ") for line in bad)
    assert any(line.startswith("--  chat template: ") for line in bad)
    assert any(line.startswith("--  pictures: ") and "preprocessor_config.json: can't be read" in line for line in bad)


def test_text_files_that_cant_be_used_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "tokenizer.json").write_text("{")
    (copy / "generation_config.json").write_text('{"temperature": -1}')
    found = list(doctor.check_text_files(copy))
    assert [(finding.name, finding.broken) for finding in found] == [
        ("tokenizer", True), ("generation", True), ("chat template", False),
    ]  # fmt: skip
    assert "not valid JSON" in found[0].text
    assert found[1].text.endswith("temperature: expected a number from 0, at most 100, found -1")
    assert found[2].text.endswith("tokenizer_config.json has no chat_template: chat is not possible")
    (copy / "chat_template.jinja").write_text("{% if %}")
    assert [finding.broken for finding in doctor.check_text_files(copy)] == [True, True, True]


def test_no_such_checkpoint(tmp_path: Path) -> None:
    found = [line for line in lines(tmp_path / "none") if line.startswith("--")]
    assert found and all(line.startswith("--  checkpoint: ") and "none" in line for line in found)


def test_the_whole_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(20_000_001))
    speed = measure(path, readers=3)
    assert speed.nbytes == 20_000_001
    assert speed.gb_per_second == pytest.approx(20_000_001 / speed.seconds / 1e9)
    with pytest.raises(ReadError):
        measure(tmp_path / "none", readers=3)


def test_a_directory_that_can_be_made_can_be_written(tmp_path: Path) -> None:
    assert doctor.can_write(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not doctor.can_write(tmp_path / "file")

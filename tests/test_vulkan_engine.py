"""A model with experts on the device: the same bytes as on the CPU, whatever is resident and whatever goes wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo_vk import cli
from mimo_vk.engine import Engine
from mimo_vk.errors import ReadError
from mimo_vk.sampling import Sampler
from mimo_vk.vulkan import setup
from mimo_vk.vulkan.client import DeviceClient
from mimo_vk.vulkan.layout import SlotLayout
from mimo_vk.vulkan.listing import Listing
from mimo_vk.vulkan.tiered_experts import TieredExperts
from tests.engines import PROMPT, make_flash, open_engine
from tests.vulkan_device import software_device

LONG = [(7 * i + i // 3) % 500 + 1 for i in range(80)]
NGEN = 20
SLOT = SlotLayout(256, 64).slot_bytes  # of the tiny checkpoint, which has 80 experts
SLOTS = 0.5 / 1e9 * SLOT  # half a slot in GB, so that (2*n + 1)*SLOTS holds n whole ones


def gb(slots: int) -> float:
    return (2 * slots + 1) * SLOTS


def open_on_device(model: Path, slots: int, **changes: Any) -> Engine:
    return open_engine(model, **{"cpu": False, "device": "llvmpipe", "tier_gb": gb(slots), "threads": 1, **changes})


def answer(engine: Engine, prompt: list[int], ngen: int) -> tuple[bytes, list[int]]:
    session = engine.session()
    logits = session.prompt(prompt, all_logits=True)
    ids = list(session.generate(logits[-1:], max_tokens=ngen, sampler=Sampler(), stop_ids=frozenset()))
    return logits.tobytes(), ids


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Path) -> tuple[bytes, list[int]]:
    with open_engine(tiny_checkpoint, threads=1) as engine:
        return answer(engine, LONG, NGEN)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 0},
        {"slots": 5},
        {"slots": 40},
        {"slots": 80, "tier_rate": 100},
        {"slots": 40, "chunk": 1},
        {"slots": 80, "chunk": 3, "tier_rate": 100},
        {"slots": 80, "chunk": 80, "cap": 4, "tier_rate": 100},
        {"slots": 7, "cap": 4, "tier_rate": 100},
        {"slots": 80, "tier_rate": 0},
    ],
    ids=str,
)
def test_the_same_bytes(tiny_checkpoint: Path, expected: tuple[bytes, list[int]], change: dict[str, Any]) -> None:
    with open_on_device(tiny_checkpoint, **change) as engine:
        assert answer(engine, LONG, NGEN) == expected
        stats = engine.snapshot_stats()
        if change["slots"] == 0:
            assert engine.tier is None
        else:
            assert stats.tier_slots == change["slots"]
            assert (stats.tier_hits > 20) == (change.get("tier_rate") != 0)


def test_several_batches_a_step(
    tiny_checkpoint: Path, expected: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of more pairs than a step takes, in a tier that changes between the batches."""
    monkeypatch.setattr(setup, "MOST_PAIRS", 40)
    with open_on_device(tiny_checkpoint, 9, tier_rate=100) as engine:
        assert engine.tier is not None and engine.tier.client.shape.max_rows == 10
        assert answer(engine, LONG, NGEN) == expected
        assert engine.tier.stats.uploads > 9


def test_two_hundred_tokens(tiny_checkpoint: Path) -> None:
    found = []
    for changes in ({"cpu": True}, {"cpu": False, "device": "llvmpipe", "tier_gb": gb(30)}):
        with open_engine(tiny_checkpoint, threads=1, **changes) as engine:
            found.append(answer(engine, PROMPT, 200))
    assert len(found[0][1]) == 200 and found[0] == found[1]


def test_what_the_device_holds_is_neither_read_nor_kept_in_memory(tiny_checkpoint: Path) -> None:
    with open_on_device(tiny_checkpoint, 80, cap=16, tier_rate=1000) as engine:
        tier = engine.tier
        assert tier is not None
        answer(engine, LONG, NGEN)
        held = {layer: set(np.flatnonzero(tier.slots(layer) >= 0).tolist()) for layer in range(1, 6)}
        assert sum(map(len, held.values())) == tier.resident > 40
        for layer, experts in held.items():
            assert not experts & engine.cache.resident(layer)
        engine.cache.reset_stats()
        answer(engine, LONG, NGEN)
        for layer, experts in held.items():
            assert not experts & set(np.flatnonzero(engine.cache.stats.accesses[layer]).tolist())


def interfere(monkeypatch: pytest.MonkeyPatch, at_step: int, harm: Callable[[DeviceClient], None]) -> None:
    """Do harm just after the given device step has begun."""
    start, count = DeviceClient.start_step, iter(range(10**9))

    def start_step(self: DeviceClient, x: Any, pairs: Any) -> None:
        harmful = next(count) == at_step
        if harmful:
            harm(self)
        start(self, x, pairs)

    monkeypatch.setattr(DeviceClient, "start_step", start_step)


def kill(client: Any) -> None:
    os.kill(client.pid, signal.SIGKILL)


def stop_then_kill(client: Any) -> None:
    """It is killed while it has a step before it: stopped now, killed once that is sent."""
    os.kill(client.pid, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {client.pid}"])


def bad_message(client: Any) -> None:
    """An exception in the middle of the process's work."""
    client._ask("step", 1, "none")


@pytest.mark.parametrize("harm", [kill, stop_then_kill, bad_message], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("at_step", [0, 40])
def test_a_lost_device_in_the_middle_of_a_request(
    tiny_checkpoint: Path,
    expected: tuple[bytes, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Any], None],
    at_step: int,
) -> None:
    """The same request goes on on the CPU with the same bytes, the next one too, and the log says it once."""
    with open_on_device(tiny_checkpoint, 40, tier_rate=100) as engine, caplog.at_level(logging.WARNING):
        interfere(monkeypatch, at_step, harm)
        assert answer(engine, LONG, NGEN) == expected
        assert engine.tier is not None and engine.tier.gone
        assert answer(engine, LONG, NGEN) == expected
        said = [record.getMessage() for record in caplog.records if "no longer used" in record.getMessage()]
        assert len(said) == 1
        assert engine.snapshot_stats().tier_slots == 0
        assert "device: lost" in "\n".join(engine.stats.lines())


def test_a_read_error_fails_its_request_and_nothing_else(
    tiny_checkpoint: Path, expected: tuple[bytes, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised while a step is under way on the device: the step's end is waited for, and the next request is right."""
    with open_on_device(tiny_checkpoint, 20, tier_rate=100) as engine:
        answer(engine, LONG, 20)

        def fails(*_: Any) -> None:
            raise ReadError("a disk is gone")

        with monkeypatch.context() as patch, pytest.raises(ReadError):
            patch.setattr(TieredExperts, "_compute_all", fails)
            engine.session().prompt(LONG)
        assert engine.tier is not None and not engine.tier.gone and not engine.tier.client._asked
        assert answer(engine, LONG, NGEN) == expected


def test_results_that_overflow_on_the_device_alone(tiny_checkpoint: Path) -> None:
    """x of 2^114 and more is infinite once the shader has scaled it: such pairs are computed again on the CPU."""
    with open_on_device(tiny_checkpoint, 80, tier_rate=1000) as engine:
        answer(engine, LONG, 40)
        tier, config = engine.tier, engine.config
        assert tier is not None
        layer = 1
        ids = np.flatnonzero(tier.slots(layer) >= 0)[None, : config.num_experts_per_tok].astype(np.int32)
        assert ids.shape[1] == config.num_experts_per_tok
        x = np.full((1, config.hidden_size), 1e-3, np.float32)
        x[0, 5] = 2.0**115
        weights = np.full(ids.shape, 0.25, np.float32)
        found = engine.model.experts(layer, x, ids, weights)
        assert tier.stats.recomputed == ids.size
        with open_engine(tiny_checkpoint) as other:
            assert found.tobytes() == other.model.experts(layer, x, ids, weights).tobytes()


def test_true_flash_dimensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = make_flash(tmp_path / "flash", monkeypatch), []
    for changes in ({"cpu": True}, {"cpu": False, "device": "llvmpipe", "tier_gb": 0.1, "tier_rate": 100}):
        with open_engine(model, threads=1, **changes) as engine:
            found.append(answer(engine, PROMPT[:4], 3))
            if engine.tier is not None:
                assert engine.tier.stats.hits > 10 and engine.tier.limit == 7
    assert found[0] == found[1]


def test_the_line_about_the_device(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_on_device(tiny_checkpoint, 5) as engine:
        assert engine.notices == [f"device {software_device().describe()}; room for 5 experts (0.000 GB)"]
        answer(engine, LONG, 5)
        assert any("device: holds 5 of 5 experts" in line for line in engine.snapshot_stats().lines())
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((software_device(),), ""))
    with open_engine(tiny_checkpoint, cpu=False) as engine:  # auto: a CPU driver is never taken by itself
        assert engine.tier is None and engine.notices == []


def test_a_device_that_fails_the_start_up_check_is_not_used(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nonexistent")  # after the listing: the device process finds no driver
    info = software_device()
    monkeypatch.setattr(setup, "list_devices", lambda: Listing((info,), ""))
    with open_on_device(tiny_checkpoint, 5) as engine:
        assert engine.tier is None
        (line,) = engine.notices
        assert line.startswith(f"device {info.describe()} is not used: ") and line.endswith("; running on the CPU")
        engine.session().prompt(PROMPT)


@pytest.fixture
def run_program(project_root: Path, tiny_checkpoint: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mimo_vk", "run", "--model", str(tiny_checkpoint), "--ids", "1 2 3 4 5 6 7"]
        return subprocess.run(
            [*command, "--ngen", "8", *flags],
            cwd=project_root, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace",
            timeout=120,
        )  # fmt: skip

    yield run


def test_the_command_line(run_program: Callable[..., Any], tmp_path: Path) -> None:
    dumps = [tmp_path / name for name in ("cpu.npy", "device.npy", "none.npy")]
    cpu = run_program("--cpu", "--dump-logits", str(dumps[0]), VK_ICD_FILENAMES="/nonexistent")
    device = run_program("--device", str(software_device().index), "--tier-gb", "0.01", "--dump-logits", str(dumps[1]))
    none = run_program("--dump-logits", str(dumps[2]), VK_ICD_FILENAMES="/nonexistent")
    assert (cpu.returncode, device.returncode, none.returncode) == (0, 0, 0)
    assert cpu.stdout == device.stdout == none.stdout != ""
    assert dumps[0].read_bytes() == dumps[1].read_bytes() == dumps[2].read_bytes()
    assert "Vulkan" not in cpu.stderr
    assert (
        f"mimo-vk: device {software_device().describe()}" in device.stderr
        and "room for 80 experts (0.004 GB)" in device.stderr
    )
    assert "mimo-vk: no Vulkan device: no driver is installed; running on the CPU" in none.stderr.splitlines()


def test_with_cpu_not_even_the_loader_is_loaded(tiny_checkpoint: Path, project_root: Path) -> None:
    program = f"""
import sys
from mimo_vk import cli
from mimo_vk.vulkan import listing, setup
setup.list_devices = None
status = cli.main(["run", "--model", {str(tiny_checkpoint)!r}, "--ids", "1 2 3", "--ngen", "2", "--cpu"])
loaded = open("/proc/self/maps").read()
sys.exit(status or "kp" in sys.modules or "libvulkan" in loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project_root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_plan_shows_the_tier(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model", str(tiny_checkpoint), "--cap", "4", "--json"]
    assert cli.main([*flags, "--device", "llvmpipe", "--tier-gb", str(gb(19))]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tier_slots"], plan["tier_bytes"], plan["tier"]) == (19, 19 * SLOT, 150_000_000 + 19 * SLOT)
    assert "llvmpipe" in plan["device"]
    assert cli.main([*flags, "--cpu"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert (without["device"], without["tier_slots"], without["tier"]) == (None, 0, 0)
    assert plan["peak_bytes"] - without["peak_bytes"] == plan["tier"]


def test_a_device_that_is_not_there(run_program: Callable[..., Any]) -> None:
    done = run_program("--device", "77")
    assert done.returncode == 2 and "--device 77: no such Vulkan device (" in done.stderr

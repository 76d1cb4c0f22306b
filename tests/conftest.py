"""What every test may rely on: the tree's root, and no MIMO_ variable of the person who runs the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo_vk.experts import ExpertCache
from mimo_vk.vulkan.subnormals import flushes
from tests.expert_disk import Disk, contiguous
from tests.live_server import LiveServer, serving
from tests.vulkan_device import software_device
from tools.make_checkpoint import make

# In test_vulkan_*.py.
DENSE_ON_A_DEVICE = {"attention", "attention_split", "dense", "dense_loss", "dense_plan", "linear", "rows", "sessions"}
DENSE_ON_A_DEVICE |= {"tower", "vision"}

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every program they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

for _name in [name for name in os.environ if name.startswith("MIMO_")]:
    del os.environ[_name]


@pytest.fixture(scope="session")
def project_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def subnormals_where_dense_layers_run(request: pytest.FixtureRequest) -> None:
    """Dense layers are never put on a device that takes subnormal floats for zero; Debian 12's keeps them."""
    if request.path.stem.removeprefix("test_vulkan_") in DENSE_ON_A_DEVICE and flushes(software_device()):
        pytest.skip("this device takes subnormal floats for zero: dense layers stay on the CPU")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The discriminating small checkpoint, seed 0. Shared: a test that changes it works on a copy."""
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make(out, "tiny")
    return out


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[LiveServer]:
    """A server with the small checkpoint and 512 tokens of context. Shared: a test leaves it idle."""
    with serving(tiny_checkpoint, "--ctx", "512") as server:
        yield server


@pytest.fixture(scope="session")
def echo_server(tiny_checkpoint: Path) -> Iterator[LiveServer]:
    """A server that answers with the last user message. Shared: a test leaves it idle."""
    with serving(tiny_checkpoint, "--ctx", "2048", program="tests.echo_model") as server:
        yield server


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Experts of two layers, back to back in a file each."""
    return contiguous(tmp_path)


@pytest.fixture
def cache(disk: Disk) -> Iterator[ExpertCache]:
    """Room for four experts of each of those layers."""
    with ExpertCache(disk.table, 4, readers=2) as cache:
        yield cache

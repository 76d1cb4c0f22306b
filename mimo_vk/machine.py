"""What this machine has for the process: cores, memory, and the limits set on both."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once, no more than a cgroup's quota of CPU time."""
    try:
        usable = os.sched_getaffinity(0)
    except (AttributeError, OSError):
        usable = set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in usable}
    return max(1, min(len(cores), math.ceil(cpu_quota())) if cpu_quota() else len(cores))


def _siblings(cpu: int) -> str:
    """A name that the hyper-threads of one core share."""
    return _text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)


def cpu_quota(cgroup: Path | None = None) -> float:
    """The CPUs' worth of time that the process's cgroups allow, or 0 where there is no quota."""
    quotas = []
    for directory in cgroup_directories("cpu") if cgroup is None else [cgroup]:
        amount, _, period = _text(directory / "cpu.max").partition(" ")
        if not amount:
            amount, period = _text(directory / "cpu.cfs_quota_us"), _text(directory / "cpu.cfs_period_us")
        if amount.isdigit() and period.isdigit() and int(period):
            quotas.append(int(amount) / int(period))
    return min(quotas, default=0.0)


def memory_total() -> int:
    """Bytes of RAM in the machine; 0 if unknown."""
    return _meminfo("MemTotal")


def memory_available() -> int:
    """Bytes that can still be taken without swapping, within the cgroups' limits; 0 if unknown."""
    free = _meminfo("MemAvailable")
    limit = cgroup_memory()
    if limit is None:
        return free
    return max(0, min(free, limit[0] - limit[1]))


def cgroup_memory(directories: list[Path] | None = None) -> tuple[int, int] | None:
    """(limit, bytes in use) of the tightest memory limit on this process's cgroups, or None.

    Reclaimable page cache isn't counted as in use.
    """
    found = []
    for directory in cgroup_directories("memory") if directories is None else directories:
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(directory / limit_name), _text(directory / used_name)
            if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
                found.append((int(limit), max(0, int(used) - _page_cache(directory))))
    return min(found, key=lambda pair: pair[0] - pair[1], default=None)


def cgroup_directories(controller: str) -> list[Path]:
    """This process's cgroup and its parents up to the root, under v2 or under a v1 controller's own tree."""
    found: list[Path] = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = CGROUP / controller if controllers else CGROUP
        place = base / name.lstrip("/")
        # Inside a container the path may be the host's, which isn't mounted there: the root then holds the limits.
        while place != base and base in place.parents:
            found.append(place)
            place = place.parent
        found.append(base)
    return [directory for directory in found if directory.is_dir()]


def cpu_flags() -> frozenset[str]:
    """The instruction sets that the kernel lists for the first CPU."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_name() -> str:
    """The CPU's name as the kernel gives it, or "unknown CPU"."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown CPU"


def _page_cache(directory: Path) -> int:
    for line in _text(directory / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _meminfo(name: str) -> int:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

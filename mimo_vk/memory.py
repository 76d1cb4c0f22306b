"""How much memory there is: the machine's, and what the control groups around this process leave of it."""

from __future__ import annotations

from pathlib import Path

_SYSTEM = Path("/")


def available_bytes(root: Path = _SYSTEM) -> int | None:
    """Bytes this process could still take: MemAvailable, or less where a cgroup's limit leaves less.

    None where the system doesn't say. ``root`` is where proc/ and sys/ are.
    """
    sizes = [size for size in (_mem_available(root), *_cgroup_rooms(root)) if size is not None]
    return max(0, min(sizes)) if sizes else None


def _mem_available(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_rooms(root: Path) -> list[int | None]:
    """What each cgroup from ours up to the top leaves: version 2, and version 1's memory controller."""
    rooms = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            top, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file "
        else:
            continue
        group = top / path.lstrip("/")
        while True:
            rooms.append(_room(group, limit, usage, cache))
            if group == top or top not in group.parents:
                break
            group = group.parent
    return rooms


def _room(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Limit less use, where page cache that can go doesn't count as use. None without a limit."""
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= 2**60:
        return None
    stats = _text(group / "memory.stat").splitlines()
    reclaimable = next((int(line.split()[1]) for line in stats if line.startswith(cache)), 0)
    return int(most) - int(used) + reclaimable


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

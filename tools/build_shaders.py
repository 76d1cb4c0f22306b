"""Compile shaders/*.comp with glslang, in two builds each, and write shaders/hashes.txt, which a test checks.

tools/build_shaders.py [NAME ...]
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimo_vk.vulkan.kernels import shader_folder, source_hash

TARGET = "vulkan1.1"
BUILDS = {".spv": [], ".denorm.spv": ["-DDENORM_PRESERVE"]}


def compile_shader(source: Path, out: Path, defines: list[str]) -> None:
    """Compile one file; glslang's messages go to standard output, and an error ends the program."""
    include = f"-I{source.parent / 'include'}"
    command = ["glslangValidator", "-V", "--quiet", "--target-env", TARGET, include, *defines, "-o", str(out)]
    subprocess.run([*command, str(source)], check=True)


def hash_line(name: str, folder: Path) -> str:
    """``name sources build build``: SHA-256 of each."""
    builds = [hashlib.sha256((folder / (name + suffix)).read_bytes()).hexdigest() for suffix in BUILDS]
    return " ".join([name, source_hash(name), *builds])


def main(names: list[str]) -> None:
    folder = shader_folder()
    known = sorted(path.stem for path in folder.glob("*.comp"))
    for name in names or known:
        for suffix, defines in BUILDS.items():
            compile_shader(folder / f"{name}.comp", folder / (name + suffix), defines)
    (folder / "hashes.txt").write_text("".join(hash_line(name, folder) + "\n" for name in known))


if __name__ == "__main__":
    main(sys.argv[1:])

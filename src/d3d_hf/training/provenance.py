"""Where data and figures come from: date, versions, machine, commit."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch


_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "peft")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that results may hang on."""
    from .. import __version__

    found = {"python": platform.python_version(), "d3d_hf": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the checkout that the package runs from, with "+" if files were changed since; `None` elsewhere."""
    folder = Path(__file__).resolve().parent

    def git(*arguments):
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
        return result.stdout.strip() if result.returncode == 0 else None

    try:
        # An installed copy may lie inside somebody else's checkout, where it is not tracked.
        if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
            return None
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit and commit + ("+" if changes else "")


def machine() -> dict[str, object]:
    """Processor, cores and accelerators; no names of hosts or users."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.system(),
        "processor": processor,
        "num_cores": os.cpu_count(),
        "accelerators": gpus,
        "num_threads": torch.get_num_threads(),
    }


def portable_command(argv: Sequence[str]) -> list[str]:
    """A command without the folders of this machine: of absolute paths, and of JSON files, the name is kept."""

    def portable(part: str) -> str:
        pieces = part.split(",")
        return ",".join(
            os.path.basename(os.path.normpath(piece))
            if os.path.isabs(piece) or piece.endswith((".jsonl", ".json"))
            else piece
            for piece in pieces
        )

    return [portable(part) for part in argv]


def provenance(argv: Sequence[str]) -> dict[str, object]:
    """
    Args:
        argv (sequence of `str`): The command that made the results; folders are left out of it.

    Returns:
        `dict` with `argv`, `date` (UTC), `versions`, `git_commit` and `machine`, all of which JSON can hold.
    """
    return {
        "argv": portable_command(argv),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": machine(),
    }


__all__ = ["git_commit", "machine", "portable_command", "provenance", "versions"]

"""
Writes the constraints files that `make demo`, `make test` and `make test-oldest` install by: `make constraints`.

    python3.12 requirements/make_constraints.py constraints ".[dev,embedded]" torch==2.13.0

writes requirements/constraints-3.12.txt: the exact versions of all packages that pip chooses today for the Python that
runs this script. pip reads their metadata alone; it installs nothing but itself, in a folder that is deleted
afterwards.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


# Torch is the caller's choice (TORCH in the Makefile), and what only its CUDA builds need goes by it.
_OF_TORCH = ("torch", "nvidia-", "cuda-")


def resolve(requirements: list[str]) -> dict[str, str]:
    """The packages that a fresh environment with these requirements would hold: name to version."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        # Older ones download whole packages to resolve.
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        report = Path(folder, "report.json")
        subprocess.run([*pip, "--dry-run", "--ignore-installed", "--report", report, *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    packages = {entry["metadata"]["name"].lower().replace("_", "-"): entry for entry in installs}
    return {
        # A local version (+cpu) says which build of a release it is, which other machines may not have.
        name: entry["metadata"]["version"].partition("+")[0]
        for name, entry in sorted(packages.items())
        if "dir_info" not in entry["download_info"] and not name.startswith(_OF_TORCH)
    }


def main(name: str, *requirements: str):
    python = "{}.{}".format(*sys.version_info)
    path = Path(__file__).parent / f"{name}-{python}.txt"
    packages = resolve(list(requirements))
    lines = [
        f"# Made by `make constraints`, never by hand: what pip chose on Python {python} for",
        f"# {' '.join(requirements)}",
        *(f"{package}=={version}" for package, version in packages.items()),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(packages)} packages, transformers {packages['transformers']}")


if __name__ == "__main__":
    main(*sys.argv[1:])

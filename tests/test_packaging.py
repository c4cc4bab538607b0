import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd, **environment):
    result = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel. The build runs in this environment, since an isolated one would fetch its back end."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


def test_wheel_content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"d3d_hf/{path.relative_to(ROOT / 'src' / 'd3d_hf')}" for path in (ROOT / "src/d3d_hf").rglob("*.py")}
    assert sources | {"d3d_hf/py.typed", "d3d_hf/hub/card_template.md"} <= names
    assert {name.split("/")[0] for name in names} == {"d3d_hf", "d3d_hf-0.1.0.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_installs_and_imports(wheel, tmp_path):
    site = tmp_path / "site"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", site, wheel,
        cwd=tmp_path,
    )  # fmt: skip
    # -P and the working folder keep the sources out of reach; the dependencies are this environment's.
    code = (
        "import importlib.metadata, d3d_hf; from d3d_hf import embedded;"
        "print(d3d_hf.__file__, d3d_hf.__version__, importlib.metadata.version('d3d_hf'))"
    )
    output = run(sys.executable, "-P", "-c", code, cwd=tmp_path, PYTHONPATH=str(site), HF_HUB_OFFLINE="1")
    file, version, wheel_version = output.split()
    assert Path(file).parent == site / "d3d_hf"
    assert version == wheel_version == "0.1.0"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", ["constraints", "constraints-oldest"])
def test_the_tested_packages_are_exact_and_within_the_ranges(name, python):
    lines = (ROOT / "requirements" / f"{name}-{python}.txt").read_text().splitlines()
    assert "make constraints" in lines[0]
    pinned = [re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)", line) for line in lines if not line.startswith("#")]
    assert len(pinned) > 50 and all(pinned), "every line is NAME==VERSION, and no build of one machine's alone"
    versions = {match[1]: match[2] for match in pinned}
    assert "torch" not in versions, "the Makefile's TORCH chooses it"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in map(Requirement, [*project["dependencies"], *extras["dev"], *extras["embedded"]]):
        if requirement.name != "torch":
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    if name == "constraints-oldest":
        (supported,) = (Requirement(line) for line in project["dependencies"] if line.startswith("transformers"))
        oldest = next(part.version for part in supported.specifier if part.operator == ">=")
        assert versions["transformers"].startswith(f"{oldest}.")

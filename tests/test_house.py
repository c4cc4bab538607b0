"""The house: which part of the package imports which, what lies where, and how long a file may get."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import d3d_hf


PACKAGE = Path(d3d_hf.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
ROOT_FILES = {"__init__.py", "cli.py", "embedded.py", "py.typed", "testing.py"}
MAX_LINES = 420


class Import(NamedTuple):
    """One name that a file of the package imports from the package."""

    path: Path
    line: int
    module: tuple[str, ...]  # below d3d_hf, the imported name last: ("model", "packing", "lay_out")
    level: int  # dots before the name; 0 for an absolute import
    is_guarded: bool  # in a function, and in a `try` that an ImportError does not leave

    @property
    def part(self) -> str | None:
        """The part of the package that the file belongs to; `None` for those at the root."""
        folders = self.path.relative_to(PACKAGE).parts[:-1]
        return folders[0] if folders else None

    def __str__(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}:{self.line} imports {'.'.join(self.module)}"


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of the package in a file, those inside functions too."""
    folders = path.relative_to(PACKAGE).parts[:-1]

    def visit(node: ast.AST, in_function: bool, in_try: bool) -> Iterator[Import]:
        found, level = [], 0
        if isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level = node.level
            start = ("d3d_hf", *folders)[: len(folders) + 2 - level] if level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            found = [(*start, *module, alias.name) for alias in node.names]
        for name in found:
            if name[0] == "d3d_hf":
                yield Import(path, node.lineno, name[1:], level, in_function and in_try)
        in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.Try):
            is_caught = any(_catches_import_errors(handler) for handler in node.handlers)
            for child in node.body:
                yield from visit(child, in_function, in_try or is_caught)
            for child in (*node.handlers, *node.orelse, *node.finalbody):
                yield from visit(child, in_function, in_try)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, in_function, in_try)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(error, ast.Name) and error.id == "ImportError" for error in caught)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [found for path in FILES for found in imports_of(path)]


@pytest.fixture(scope="module")
def between_parts(imports) -> dict[tuple[str, str], list[Import]]:
    """Imports by the part that imports and the part that is imported."""
    pairs = defaultdict(list)
    for found in imports:
        if found.part and found.module and found.module[0] in PARTS and found.module[0] != found.part:
            pairs[found.part, found.module[0]].append(found)
    return dict(pairs)


def _lines(found) -> str:
    return "\n" + "\n".join(map(str, found))


def test_the_imports_are_seen(between_parts):
    """A test of imports that saw none would pass."""
    assert {("commands", "training"), ("pruning", "training"), ("training", "model")} <= between_parts.keys()
    loaders = {found.path.name for found in between_parts["commands", "training"]}
    assert "evaluate.py" in loaders, "imports inside functions"


def test_no_two_parts_import_each_other(between_parts):
    wrong = [found for pair, part in between_parts.items() if pair[::-1] in between_parts for found in part]
    assert not wrong, _lines(wrong)


def test_arrows_between_parts_make_no_circle(between_parts):
    graph = {part: {imported for importer, imported in between_parts if importer == part} for part in PARTS}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{error.args[0]}: {' <- '.join(error.args[1])}")


def test_parts_reach_each_other_by_name_not_through_the_root(imports):
    """The root imports several parts, so a part that took their names from it would hide an arrow."""
    allowed = {*PARTS, *(name.removesuffix(".py") for name in ROOT_FILES), "__version__"}
    wrong = [found for found in imports if found.part and not (found.module and found.module[0] in allowed)]
    assert not wrong, _lines(wrong)


def test_nothing_imports_the_commands_or_the_command_line(imports):
    outside = [found for found in imports if found.part != "commands" and found.path.name != "cli.py"]
    wrong = [found for found in outside if found.module and found.module[0] in ("commands", "cli")]
    assert not wrong, _lines(wrong)


def test_the_root_holds_what_belongs_there():
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == ROOT_FILES
    assert all((PACKAGE / part / "__init__.py").is_file() for part in PARTS)


def test_the_model_is_flat():
    folders = [path.name for path in (PACKAGE / "model").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert not folders


def test_the_model_imports_files_of_its_own_folder_alone(imports):
    """A repository on the Hub carries the folder whole, and transformers finds `from .x import y` alone."""
    siblings = {path.stem for path in (PACKAGE / "model").glob("*.py")}

    def is_allowed(found: Import) -> bool:
        if found.level:
            return found.level == 1 and len(found.module) == 3 and found.module[1] in siblings
        return found.module[:1] == ("embedded",) and found.is_guarded

    wrong = [found for found in imports if found.part == "model" and not is_allowed(found)]
    assert not wrong, _lines(wrong)


def test_files_are_short():
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    wrong = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not wrong, "split by concept"

"""
Writing tables into docs/scaling.md and docs/when-it-pays.md.

A page holds its prose and, between the lines `<!-- table: NAME -->` and `<!-- end -->`, what the table of that name
gives. `d3d-hf predict --update-page` writes the tables anew; a test compares. All of it is predicted, from what each
page's table of assumptions says; the figures of docs/results that go in are read from there.
"""

import re
from collections.abc import Callable
from pathlib import Path

from .paying_tables import PAYING_TABLES
from .scaling_tables import SCALING_TABLES


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__.replace("_", "-"): table for table in (*SCALING_TABLES, *PAYING_TABLES)
}
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def rendered(text: str, results: Path) -> str:
    """
    A page with its tables written anew.

    Args:
        text (`str`): The page.
        results (`Path`): Folder of the measured results that go in.

    Raises:
        ValueError: The page has no tables, or one of an unknown name.
    """
    if not _MARKED.search(text):
        raise ValueError("the page has no lines <!-- table: NAME --> and <!-- end -->: mark where its tables stand.")

    def table(match: re.Match) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"the page has a table {name!r}: choose among {', '.join(TABLES)}.")
        return f"{match[1]}{TABLES[name](results)}\n{match[4]}"

    return _MARKED.sub(table, text)


def update_page(path: str | Path):
    """Writes the tables of a page anew; measured results come from the folder `results` beside it."""
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(rendered(text, path.parent / "results"), encoding="utf-8")


__all__ = ["TABLES", "rendered", "update_page"]

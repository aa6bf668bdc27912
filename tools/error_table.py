"""Write the table of error codes from the classes: ``python -m tools.error_table > docs/errors.md``."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

import patchkit
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """\
# Error codes

Every error has a stable, kebab-case code, which `--json` prints as `errors[].code`, and an exit code.
`python -m tools.error_table` writes this page.

| exit | code | meaning |
|---|---|---|
"""


def classes(base: type[PatchkitError] = PatchkitError) -> Iterator[type[PatchkitError]]:
    for child in base.__subclasses__():
        yield child
        yield from classes(child)


def import_everything() -> None:
    for module in pkgutil.walk_packages(patchkit.__path__, "patchkit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def meaning(error: type[PatchkitError]) -> str:
    """The first sentence of the docstring, else the class's name in words."""
    text = " ".join((error.__doc__ or "").split()) if "__doc__" in vars(error) and error.__doc__ else ""
    if text:
        return re.split(r"(?<=\.)\s", text)[0].rstrip(".").replace("``", "`").replace("|", "\\|")
    words = re.findall(r"[A-Z][a-z]*", error.__name__.removeprefix("_").removesuffix("Error"))
    return " ".join(words).capitalize()


def table() -> str:
    import_everything()
    rows: dict[tuple[int, str], str] = {}
    for error in sorted(classes(), key=lambda error: (error.__module__, error.__name__)):
        if error.code not in ("error", "several"):
            rows.setdefault((error.exit_code, error.code), meaning(error))
    body = "".join(
        f"| {exit_code} | `{code}` | {rows[exit_code, code]} |\n" for exit_code, code in sorted(rows)
    )
    return HEAD + body


if __name__ == "__main__":
    print(table(), end="")

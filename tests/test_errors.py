"""Errors are part of the product: documented, stable codes."""

from __future__ import annotations

import re
from pathlib import Path

from patchkit.errors import PatchkitError
from tools import error_table

PROJECT = Path(__file__).resolve().parents[1]


def test_the_documented_table_is_that_of_the_code() -> None:
    assert (PROJECT / "docs" / "errors.md").read_text(encoding="utf-8") == error_table.table()


def test_codes_are_kebab_case_and_exit_codes_those_of_the_contract() -> None:
    error_table.import_everything()
    for error in error_table.classes():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", error.code), error
        # 126 and 127: a command that cannot be run, as of a shell.
        assert error.exit_code in {1, 2, 3, 4, 5, 6, 70, 125, 126, 127, 130}, error


def test_an_error_is_one_line_with_its_hint() -> None:
    error = PatchkitError("what", path="where", hint="do this")
    assert str(error) == "what; do this"
    assert error.to_json() == {"code": "error", "message": "what", "path": "where", "hint": "do this"}

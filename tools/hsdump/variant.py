"""One variant's files on disk: the diff and its manifest, written so that equal input gives equal bytes."""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MODE = 0o644  # what pip gives every plain file of a wheel


@dataclass(frozen=True)
class Source:
    """One file of the root: ``before`` is None where the patch adds it."""

    path: str
    before: bytes | None
    after: bytes


def diff(sources: list[Source]) -> bytes:
    """A git-style diff with three lines of context."""
    parts: list[str] = []
    for source in sources:
        old = "/dev/null" if source.before is None else f"a/{source.path}"
        parts.append(f"diff --git a/{source.path} b/{source.path}\n")
        if source.before is None:
            parts.append("new file mode 100644\n")
        lines = difflib.unified_diff(
            split(source.before or b""), split(source.after), old, f"b/{source.path}", n=3
        )
        for line in lines:
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts).encode()


def split(content: bytes) -> list[str]:
    """Lines as a diff means them: only a line feed ends one."""
    lines = [line + "\n" for line in content.decode().split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def pin(content: bytes | None) -> dict[str, Any] | None:
    if content is None:
        return None
    return {"mode": f"{MODE:04o}", "sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def manifest(patch: str, releases: list[str], sources: list[Source]) -> dict[str, Any]:
    return {
        "diff_sha256": hashlib.sha256(diff(sources)).hexdigest(),
        "distribution": "sglang",
        "files": [
            {
                "after": pin(source.after),
                "before": pin(source.before),
                "change": "add" if source.before is None else "modify",
                "path": source.path,
            }
            for source in sources
        ],
        "on": [],
        "patch": patch,
        "releases": releases,
        "schema": 1,
    }


def write(folder: Path, patch: str, releases: list[str], sources: list[Source]) -> None:
    """Write the variant of ``releases``, which have equal files, named after the first of them."""
    stem = folder / f"sglang-{releases[0]}"
    stem.with_name(stem.name + ".patch").write_bytes(diff(sources))
    text = json.dumps(manifest(patch, releases, sources), indent=2, sort_keys=True) + "\n"
    stem.with_name(stem.name + ".manifest.json").write_text(text, encoding="utf-8")

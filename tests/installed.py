"""A distribution in a folder of its own, with the metadata that an installer writes."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path


def install(site: Path, name: str, release: str, files: dict[str, bytes]) -> Path:
    """Put ``files`` and a dist-info with its RECORD into ``site``, and return it."""
    rows = []
    info = f"{name}-{release}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n".encode()
    for path, data in {**files, f"{info}/METADATA": metadata}.items():
        full = site / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    rows.append(f"{info}/RECORD,,\n")
    (site / info / "RECORD").write_text("".join(rows))
    return site


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative path."""
    return {
        os.path.relpath(os.path.join(top, name), folder): Path(top, name).read_bytes()
        for top, _, names in os.walk(folder)
        for name in names
    }

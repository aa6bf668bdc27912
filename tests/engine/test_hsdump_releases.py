"""Each pinned release: the patches fit the files of its wheel, compile, import, and come off to RECORD's bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from patchkit.catalog import load_patch
from patchkit.diff import Content, apply, parse, reverse
from tests.engine.harness import patchkit
from tools.hsdump import wheels
from tools.hsdump.models import MODELS

PATCHES = Path(__file__).resolve().parents[2] / "patches"
RELEASES = load_patch(str(PATCHES / "hsdump")).releases
DUMP = "sglang/srt/hs_dump.py"


def recorded(root: Path) -> dict[str, str]:
    """path -> sha256 in hex, for the model files, out of the wheel's own RECORD."""
    (record,) = root.glob("sglang-*.dist-info/RECORD")
    digests = {}
    with record.open(newline="") as lines:
        for path, digest, _size in csv.reader(lines):
            if path in wheels.PATHS:
                digests[path] = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==").hex()
    return digests


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.releases
@pytest.mark.parametrize("release", RELEASES)
def test_patches_fit_the_wheels_files_and_come_off_to_record(release: str) -> None:
    pristine = {path: Content(data, 0o644) for path, data in wheels.sources(release).items()}
    record = recorded(wheels.folder(release))
    assert {path: sha256(content.data) for path, content in pristine.items()} == record
    for model in MODELS:
        patch = load_patch(str(PATCHES / model.patch))
        (variant,) = [v for v in patch.variants if release in v.manifest.releases]
        diff = parse(variant.diff_bytes())
        made = variant.manifest.apply(diff, pristine.get)  # both sides' digests are the pinned ones
        assert len(made) == 2
        for path, content in made.items():
            assert content is not None
            compile(content.data, path, "exec")
        tree = {**pristine, **made}
        for path, content in apply(reverse(diff), tree.get).items():
            assert (None if content is None else sha256(content.data)) == record.get(path)


@pytest.mark.releases
@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[len(RELEASES) // 2], RELEASES[-1]])
@pytest.mark.parametrize("patch", [model.patch for model in MODELS])
def test_the_command_applies_and_restores(release: str, patch: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(wheels.folder(release), root)
    patchkit("--root", root, "--patches", PATCHES, "apply", patch)
    changed = [p for p, data in wheels.sources(release).items() if (root / p).read_bytes() != data]
    assert len(changed) == 1
    spec = importlib.util.spec_from_file_location("hs_dump", root / DUMP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.attach(None, "") is None
    patchkit("--root", root, "--patches", PATCHES, "restore", patch)
    assert all((root / p).read_bytes() == data for p, data in wheels.sources(release).items())
    assert not (root / DUMP).exists()


def test_every_patch_is_pinned_to_every_release_and_adds_the_same_module() -> None:
    source = (PATCHES.parent / "tools" / "hsdump" / "hs_dump.py").read_bytes()
    expected = (hashlib.sha256(source).hexdigest(), len(source))
    assert len(RELEASES) >= 71
    for model in MODELS:
        patch = load_patch(str(PATCHES / model.patch))
        assert patch.releases == RELEASES
        for variant in patch.variants:
            (added,) = [file for file in variant.manifest.files if file.change == "add"]
            assert added.after is not None
            assert (added.path, (added.after.sha256, added.after.size)) == (DUMP, expected)
            variant.diff_bytes()  # proves the pinned digest


def test_variants_are_shared_where_the_files_are_equal() -> None:
    for model in MODELS:
        befores = [
            tuple((file.path, file.before) for file in variant.manifest.files)
            for variant in load_patch(str(PATCHES / model.patch)).variants
        ]
        assert len(set(befores)) == len(befores)


def test_no_path_of_the_cache_is_inside_the_checkout() -> None:
    assert not wheels.folder("0.0.0", fetch=False).is_relative_to(PATCHES.parent)
    assert os.path.isabs(wheels.folder("0.0.0", fetch=False))

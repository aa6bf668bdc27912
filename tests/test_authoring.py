"""import, pin, new, refresh and lint on real folders, and their commands as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patchkit import diff as d
from patchkit.authoring import errors as e
from patchkit.authoring.base import Base
from patchkit.authoring.import_ import import_
from patchkit.authoring.lint import lint
from patchkit.authoring.pin import pin
from patchkit.authoring.refresh import refresh
from patchkit.authoring.scratch import new
from patchkit.catalog import Catalog, DiffDigestError
from patchkit.diff.errors import DiffError, MismatchError, UnsupportedDiffError
from patchkit.errors import PatchkitError
from patchkit.manifest import Manifest, ManifestError, PinMismatchError
from patchkit.selection import UnknownReleaseError
from patchkit.target import environment, locate
from patchkit.tree import UnsafePathError
from tests.installed import contents, install

MODEL = b"".join(b"line %d\n" % n for n in range(1, 41))
FILES = {
    "engine/__init__.py": b"",
    "engine/srt/__init__.py": b"",
    "engine/srt/model.py": MODEL,
    "engine/srt/server.py": b"import model\n\n\ndef serve():\n    return model\n",
    "engine/data.bin": bytes(range(256)),
}


class Bench:
    """An installed distribution, a patches folder, and short ways to call each function."""

    def __init__(self, folder: Path, release: str = "1.0") -> None:
        self.site = install(folder / f"site-{release}", "engine", release, FILES)
        self.patches = folder / "patches"
        self.patches.mkdir(exist_ok=True)
        self.folder = folder

    @property
    def catalog(self) -> Catalog:
        return Catalog([str(self.patches)])

    def base(self, *on: str, release: str | None = None) -> Base:
        target = locate("engine", environment(root=str(self.site)))
        return Base(target, self.catalog, release=release, on=on)

    def import_(self, patch: bytes, name: str = "p", *, on: tuple[str, ...] = (), **options):
        source = self.folder / f"{name}.diff"
        source.write_bytes(patch)
        return import_(str(source), name=name, base=self.base(*on), catalog=self.catalog, **options)

    def new(self, name: str, *files: str, on: tuple[str, ...] = ()):
        return new(name, files, base=self.base(*on), catalog=self.catalog)

    def refresh(self, name: str, *on: str):
        return refresh(name, base=self.base(*on), catalog=self.catalog)

    def pin(self, name: str, *on: str):
        return pin(name, base=self.base(*on), catalog=self.catalog)

    def lint(self) -> list[PatchkitError]:
        return lint([str(self.patches)]).problems

    def result(self, name: str, *on: str) -> dict[str, bytes | None]:
        """What the stored variant makes of the installed files."""
        base = self.base(*on)
        variant = base.variant(self.catalog[name])
        assert variant is not None
        made = variant.manifest.apply(d.parse(variant.diff_bytes()), base.read)
        return {path: None if content is None else content.data for path, content in made.items()}

    def scratch(self, name: str = "p") -> Path:
        return self.patches / name / "edit" / "files"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def edit(path: str, at: int = 20, old: int | None = None, text: bytes = b"changed\n") -> bytes:
    """A plain diff of the model, whose line ``old`` (default ``at``) it expects at line ``at``."""
    number = at if old is None else old
    header = f"--- a/{path}\n+++ b/{path}\n@@ -{at - 1},3 +{at - 1},3 @@\n"
    before = f" line {number - 1}\n-line {number}\n"
    return (header + before).encode() + b"+" + text + f" line {number + 1}\n".encode()


CHANGED = MODEL.replace(b"line 20\n", b"changed\n")

# -- import ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "strip", "prefix"),
    [
        ("engine/srt/model.py", 1, ""),
        ("python/engine/srt/model.py", 2, ""),
        ("x/y/z/engine/srt/model.py", 4, ""),
        ("srt/model.py", 1, "engine/"),
    ],
)
def test_the_strip_level_is_found_from_the_tree(bench, path, strip, prefix):
    done = bench.import_(edit(path))
    assert (done.placement.strip, done.placement.prefix) == (strip, prefix)
    assert bench.result("p") == {"engine/srt/model.py": CHANGED}
    assert bench.lint() == []


def test_names_without_a_prefix_are_stripped_of_nothing(bench):
    patch = edit("engine/srt/model.py").replace(b"a/", b"").replace(b"b/", b"")
    bench.import_(patch)
    assert bench.result("p") == {"engine/srt/model.py": CHANGED}


def test_two_strip_levels_that_fit_are_refused_with_both(tmp_path):
    bench = Bench(tmp_path)
    install(bench.site, "engine", "1.0", {**FILES, "engine/engine/srt/model.py": MODEL})
    with pytest.raises(e.StripLevelError) as caught:
        bench.import_(edit("engine/engine/srt/model.py"))
    assert [level for level, _ in caught.value.fits] == ["-p 1", "-p 2"]
    assert list(bench.patches.iterdir()) == []
    bench.import_(edit("engine/engine/srt/model.py"), strip=2)
    assert set(bench.result("p")) == {"engine/srt/model.py"}


def test_of_two_levels_the_one_whose_text_fits_is_taken(tmp_path):
    bench = Bench(tmp_path)
    install(bench.site, "engine", "1.0", {**FILES, "engine/engine/srt/model.py": b"other\n"})
    bench.import_(edit("engine/engine/srt/model.py"))
    assert set(bench.result("p")) == {"engine/srt/model.py"}


def test_a_diff_for_something_else_is_refused(bench):
    with pytest.raises(e.StripLevelError) as caught:
        bench.import_(edit("llm/core.py"))
    assert caught.value.fits == []


OUTSIDE = ["docs/a.md", "test/srt/test_x.py", ".github/w.yml", "sgl-kernel/src/k.cu"]


def test_paths_that_are_not_installed_are_listed_or_left_out_and_recorded(bench):
    patch = edit("python/engine/srt/model.py") + b"".join(edit(path) for path in OUTSIDE)
    patch += b"--- /dev/null\n+++ b/README\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(e.OutsidePackageError) as caught:
        bench.import_(patch)
    assert caught.value.paths == [*OUTSIDE, "README"]
    assert "--only-package" in str(caught.value)
    done = bench.import_(patch, only_package=True)
    assert list(done.left_out) == [*OUTSIDE, "README"]
    text = (bench.patches / "p/engine-1.0.patch").read_text()
    assert all(f"Left out: {path}\n" in text for path in done.left_out)
    assert bench.result("p") == {"engine/srt/model.py": CHANGED}


UNUSABLE = {
    "a symbolic link": b"diff --git a/{} b/{}\nnew file mode 120000\nindex 0000000..2b7c8d1\n--- /dev/null\n"
    b"+++ b/{}\n@@ -0,0 +1 @@\n+elsewhere\n\\ No newline at end of file\n",
    "a submodule": b"diff --git a/{} b/{}\nindex 1111111..2222222 160000\n--- a/{}\n+++ b/{}\n@@ -1 +1 @@\n"
    b"-Subproject commit 1111111\n+Subproject commit 2222222\n",
    "a picture": b"diff --git a/{} b/{}\nindex 1111111..2222222 100644\nBinary files a/{} and b/{} differ\n",
    "a copy": b"diff --git a/x b/{}\nsimilarity index 100%\ncopy from x\ncopy to {}\n",
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_never_applied_may_be_left_out_but_not_in_the_package(bench, kind):
    section = UNUSABLE[kind]
    outside = section.replace(b"{}", b"docs/thing")
    if kind == "a copy":  # which names two files; nobody guesses which one is meant
        with pytest.raises(UnsupportedDiffError):
            bench.import_(edit("engine/srt/model.py") + outside, only_package=True)
        return
    patch = outside + edit("python/engine/srt/model.py") + outside.replace(b"thing", b"other")
    with pytest.raises(e.OutsidePackageError) as caught:
        bench.import_(patch)
    assert caught.value.paths == ["docs/thing", "docs/other"]
    done = bench.import_(patch, only_package=True)
    assert list(done.left_out) == ["docs/thing", "docs/other"]
    assert bench.result("p") == {"engine/srt/model.py": CHANGED}
    inside = edit("python/engine/srt/model.py") + section.replace(b"{}", b"python/engine/srt/thing")
    with pytest.raises(UnsupportedDiffError) as refused:
        bench.import_(inside, name="q", only_package=True)
    assert refused.value.line > edit("python/engine/srt/model.py").count(b"\n")
    assert not (bench.patches / "q").exists()


def test_a_missing_file_in_an_installed_folder_is_never_left_out(bench):
    patch = edit("engine/srt/model.py") + edit("engine/srt/gone.py")
    with pytest.raises(DiffError, match="not there"):
        bench.import_(patch, only_package=True)


def test_a_hunk_that_stands_elsewhere_once_moves_only_when_asked(bench):
    patch = edit("engine/srt/model.py", at=25, old=20) + b"@@ -35 +35 @@\n-line 35\n+other\n"
    with pytest.raises(e.HunksMovedError) as caught:
        bench.import_(patch)
    assert caught.value.moved == [("engine/srt/model.py", 24, 19)]
    assert "--rebase" in str(caught.value)
    done = bench.import_(patch, move=True)
    assert [vars(one) for one in done.moved] == [
        {"path": "engine/srt/model.py", "old_line": 24, "new_line": 19}
    ]
    assert bench.result("p") == {"engine/srt/model.py": CHANGED.replace(b"line 35\n", b"other\n")}
    assert b"@@ -19,3 +19,3 @@" in (bench.patches / "p/engine-1.0.patch").read_bytes()


def test_a_hunk_that_grew_moves_the_new_lines_of_those_below(bench):
    first = b"--- a/engine/srt/model.py\n+++ b/engine/srt/model.py\n@@ -12 +12,3 @@\n-line 10\n+x\n+y\n+z\n"
    bench.import_(first + b"@@ -30 +32 @@\n-line 29\n+q\n", move=True)
    want = MODEL.replace(b"line 10\n", b"x\ny\nz\n").replace(b"line 29\n", b"q\n")
    assert bench.result("p") == {"engine/srt/model.py": want}


def test_a_hunk_whose_lines_stand_twice_or_never_does_not_move(bench):
    bench.site = install(bench.folder / "twice", "engine", "1.0", {**FILES, "engine/srt/model.py": MODEL * 2})
    with pytest.raises(MismatchError, match="2 times"):
        bench.import_(edit("engine/srt/model.py", at=25, old=20), move=True)
    with pytest.raises(MismatchError, match="do not stand"):
        bench.import_(edit("engine/srt/model.py", at=25, old=99), move=True)


def test_a_folder_of_patches_is_taken_in_order_as_one(bench):
    source = bench.folder / "mails"
    source.mkdir()
    (source / "0001-a.patch").write_bytes(edit("python/engine/srt/model.py", text=b"once\n"))
    second = edit("python/engine/srt/model.py").replace(b"-line 20", b"-once").replace(b"+changed", b"+twice")
    (source / "0002-b.patch").write_bytes(second)
    (source / "notes.txt").write_text("not a patch")
    import_(str(source), name="p", base=bench.base(), catalog=bench.catalog)
    assert bench.result("p") == {"engine/srt/model.py": MODEL.replace(b"line 20\n", b"twice\n")}
    assert bench.lint() == []


@pytest.mark.parametrize("there", [False, True])
def test_a_source_without_a_diff_is_refused(bench, there):
    if there:
        (bench.folder / "nothing").mkdir()
    with pytest.raises(e.NoDiffsError):
        import_(str(bench.folder / "nothing"), name="p", base=bench.base(), catalog=bench.catalog)


def test_an_import_twice_writes_nothing_and_another_is_refused(bench):
    assert bench.import_(edit("engine/srt/model.py")).changed
    before = contents(bench.patches)
    assert not bench.import_(edit("engine/srt/model.py")).changed
    with pytest.raises(e.VariantExistsError):
        bench.import_(edit("engine/srt/model.py", at=30))
    assert contents(bench.patches) == before


def test_a_tree_that_is_not_pristine_is_refused(bench):
    (bench.site / "engine/srt/model.py").write_bytes(MODEL + b"local edit\n")
    with pytest.raises(e.NotPristineError):
        bench.import_(edit("engine/srt/model.py"))


def test_a_folder_symlink_out_of_the_root_is_refused(bench):
    outside = bench.folder / "outside"
    outside.mkdir()
    (outside / "model.py").write_bytes(MODEL)
    (bench.site / "engine/link").symlink_to(outside)
    with pytest.raises(UnsafePathError, match="leads out of the root"):
        bench.import_(edit("engine/link/model.py"))
    assert (outside / "model.py").read_bytes() == MODEL


def test_another_release_than_the_installed_one_is_refused(bench):
    with pytest.raises(e.ReleaseMismatchError):
        bench.base(release="2.0")


def test_a_name_that_is_no_folder_name_is_refused(bench):
    source = bench.folder / "x.diff"
    source.write_bytes(edit("engine/srt/model.py"))
    with pytest.raises(e.BadNameError):
        import_(str(source), name="../p", base=bench.base(), catalog=bench.catalog)


def test_a_patch_on_another_is_made_on_its_result(bench):
    bench.import_(edit("engine/srt/model.py"))
    second = edit("engine/srt/model.py").replace(b"-line 20", b"-changed").replace(b"+changed", b"+again")
    with pytest.raises(MismatchError):
        bench.import_(second, "q")
    done = bench.import_(second, "q", on=("p",))
    assert done.manifest.on == ("p",)
    assert bench.result("q", "p") == {"engine/srt/model.py": MODEL.replace(b"line 20\n", b"again\n")}
    assert bench.catalog["q"].after == ("p",)
    assert bench.lint() == []


def test_a_patch_below_that_touches_other_files_is_not_recorded(bench):
    bench.import_(edit("engine/srt/model.py"))
    server = (
        b"--- a/engine/srt/server.py\n+++ b/engine/srt/server.py\n@@ -1 +1 @@\n-import model\n+import m\n"
    )
    assert bench.import_(server, "q", on=("p",)).manifest.on == ()


def test_what_a_patch_below_stands_on_is_put_below_too(bench):
    bench.import_(edit("engine/srt/model.py"))
    second = edit("engine/srt/model.py").replace(b"-line 20", b"-changed").replace(b"+changed", b"+again")
    bench.import_(second, "q", on=("p",))
    third = edit("engine/srt/model.py").replace(b"-line 20", b"-again").replace(b"+changed", b"+more")
    assert bench.import_(third, "r", on=("q",)).manifest.on == ("p", "q")


# -- new and refresh ------------------------------------------------------------------------------


def test_edits_of_every_kind_become_the_patch(bench):
    opened = bench.new("p", "engine/srt", "engine/data.bin")
    assert set(opened.added) == {path for path in FILES if "srt" in path or "data" in path}
    files = bench.scratch()
    (files / "engine/srt/model.py").write_bytes(CHANGED)
    (files / "engine/srt/server.py").rename(files / "engine/srt/service.py")
    (files / "engine/srt/__init__.py").unlink()
    (files / "engine/srt/new.py").write_bytes(b"no newline")
    (files / "engine/srt/new.py").chmod(0o755)
    (files / "engine/data.bin").write_bytes(bytes(range(256))[::-1])
    done = bench.refresh("p")
    assert done.changed
    assert [(pin.path, pin.change, pin.source) for pin in done.manifest.files] == [
        ("engine/data.bin", "modify", None),
        ("engine/srt/__init__.py", "delete", None),
        ("engine/srt/model.py", "modify", None),
        ("engine/srt/new.py", "add", None),
        ("engine/srt/service.py", "rename", "engine/srt/server.py"),
    ]
    assert bench.result("p") == {
        "engine/data.bin": bytes(range(256))[::-1],
        "engine/srt/__init__.py": None,
        "engine/srt/model.py": CHANGED,
        "engine/srt/new.py": b"no newline",
        "engine/srt/server.py": None,
        "engine/srt/service.py": FILES["engine/srt/server.py"],
    }
    assert [pin.after.mode for pin in done.manifest.files if pin.change == "add"] == [0o755]
    assert bench.lint() == []
    text = (bench.patches / "p/engine-1.0.patch").read_bytes()
    assert text.startswith(b"diff --git a/engine/data.bin b/engine/data.bin\nindex ")


def test_git_applies_a_refreshed_patch_to_the_same_bytes(bench):
    bench.new("p", "engine")
    files = bench.scratch()
    (files / "engine/srt/model.py").write_bytes(CHANGED)
    (files / "engine/a new one").write_bytes(b"\xff\r\n")
    bench.refresh("p")
    patch = bench.patches / "p/engine-1.0.patch"
    copy = bench.folder / "copy"
    install(copy, "engine", "1.0", FILES)
    subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=copy, check=True)
    assert (copy / "engine/srt/model.py").read_bytes() == CHANGED
    assert (copy / "engine/a new one").read_bytes() == b"\xff\r\n"


def test_refreshing_without_an_edit_changes_no_byte(bench):
    bench.new("p", "engine/srt/model.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED)
    bench.refresh("p")
    before = contents(bench.patches)
    done = bench.refresh("p")
    assert not done.changed
    assert contents(bench.patches) == before


def test_refreshing_an_imported_patch_keeps_its_own_hunks(bench):
    # No context lines, and a preamble: nothing that a refresh would write by itself.
    patch = b"--- a/engine/srt/model.py\n+++ b/engine/srt/model.py\n@@ -20 +20 @@\n-line 20\n+changed\n"
    bench.import_(patch)
    before = contents(bench.patches)
    assert not bench.refresh("p").changed
    bench.new("p")
    assert not bench.refresh("p").changed
    after = contents(bench.patches)
    assert {path: after[path] for path in before} == before
    # An edit keeps what was imported and the words above it.
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED + b"end\n")
    assert bench.refresh("p").changed
    assert bench.result("p") == {"engine/srt/model.py": CHANGED + b"end\n"}
    assert (bench.patches / "p/engine-1.0.patch").read_bytes().startswith(b"Imported from ")


def test_opening_again_never_writes_over_an_edit(bench):
    bench.new("p", "engine/srt/model.py")
    file = bench.scratch() / "engine/srt/model.py"
    file.write_bytes(b"precious\n")
    (bench.scratch() / "engine/srt/mine.py").write_bytes(b"mine\n")
    opened = bench.new("p", "engine/srt")
    assert file.read_bytes() == b"precious\n"
    assert (bench.scratch() / "engine/srt/mine.py").read_bytes() == b"mine\n"
    assert "engine/srt/model.py" in opened.kept


def test_a_deleted_scratch_file_stays_deleted_when_opened_again(bench):
    bench.new("p", "engine/srt/model.py", "engine/srt/server.py")
    (bench.scratch() / "engine/srt/model.py").unlink()
    bench.new("p", "engine/srt/server.py")
    assert bench.refresh("p").manifest.files[0].change == "delete"


def test_files_of_the_patch_that_are_not_open_stay_in_it(bench):
    bench.new("p", "engine/srt/model.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED)
    bench.refresh("p")
    (bench.patches / "p/edit").rename(bench.folder / "put-aside")
    bench.new("p", "engine/srt/server.py")
    (bench.scratch() / "engine/srt/server.py").write_bytes(b"x\n")
    bench.refresh("p")
    assert bench.result("p") == {"engine/srt/model.py": CHANGED, "engine/srt/server.py": b"x\n"}


def test_an_edit_taken_back_leaves_the_patch(bench):
    bench.new("p", "engine/srt/model.py", "engine/srt/server.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED)
    (bench.scratch() / "engine/srt/server.py").write_bytes(b"x\n")
    bench.refresh("p")
    (bench.scratch() / "engine/srt/model.py").write_bytes(MODEL)
    assert [pin.path for pin in bench.refresh("p").manifest.files] == ["engine/srt/server.py"]


def test_nothing_changed_is_refused(bench):
    bench.new("p", "engine/srt/model.py")
    with pytest.raises(e.NothingChangedError):
        bench.refresh("p")
    assert not (bench.patches / "p/engine-1.0.patch").exists()


def test_litter_of_editors_and_interpreters_is_not_part_of_the_patch(bench):
    bench.new("p", "engine/srt/model.py")
    files = bench.scratch()
    (files / "engine/srt/model.py").write_bytes(CHANGED)
    (files / "engine/srt/model.py~").write_bytes(MODEL)
    (files / "engine/srt/.model.py.swp").write_bytes(b"\0")
    (files / "engine/srt/__pycache__").mkdir()
    (files / "engine/srt/__pycache__/model.cpython-312.pyc").write_bytes(b"\0")
    assert [pin.path for pin in bench.refresh("p").manifest.files] == ["engine/srt/model.py"]
    assert (files / "engine/srt/model.py~").exists()


def test_a_scratch_copy_that_was_moved_away_deletes_nothing(bench):
    bench.new("p", "engine/srt/model.py", "engine/srt/server.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED)
    bench.refresh("p")
    before = contents(bench.patches / "p/edit")
    bench.scratch().rename(bench.folder / "moved")
    with pytest.raises(e.ScratchError, match="no files"):
        bench.refresh("p")
    (bench.folder / "moved").rename(bench.scratch())
    assert contents(bench.patches / "p/edit") == before


def test_a_symlink_in_the_scratch_copy_is_refused(bench):
    bench.new("p", "engine/srt/model.py")
    (bench.scratch() / "engine/link.py").symlink_to("/etc/passwd")
    with pytest.raises(e.ScratchError, match="symbolic link"):
        bench.refresh("p")


def test_a_scratch_copy_of_another_release_is_refused(tmp_path):
    Bench(tmp_path).new("p", "engine/srt/model.py")
    with pytest.raises(e.ScratchError, match=r"1\.0"):
        Bench(tmp_path, "2.0").refresh("p")


def test_a_broken_index_is_refused_and_left_alone(bench):
    bench.new("p", "engine/srt/model.py")
    index = bench.patches / "p/edit/base.json"
    for text in ("{", "[]", '{"schema": 9}', '{"schema": 1, "release": "1.0", "on": [], "files": ["../x"]}'):
        index.write_text(text)
        with pytest.raises(e.ScratchError):
            bench.refresh("p")
        assert index.read_text() == text


def test_a_lost_index_is_refused_and_mended_by_opening_again(bench):
    bench.new("p", "engine/srt/model.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED)
    (bench.patches / "p/edit/base.json").unlink()
    with pytest.raises(e.ScratchError, match="patchkit new p"):
        bench.refresh("p")
    bench.new("p")
    bench.refresh("p")
    assert bench.result("p") == {"engine/srt/model.py": CHANGED}


@pytest.mark.parametrize("path", ["nope.py", "engine/nope.py", "../x", "/etc/passwd"])
def test_opening_what_is_not_there_is_refused(bench, path):
    with pytest.raises(PatchkitError):
        bench.new("p", path)
    assert list(bench.patches.iterdir()) == []


# -- pin ------------------------------------------------------------------------------------------


def test_pin_mends_a_manifest_after_the_diff_was_edited(bench):
    done = bench.import_(edit("engine/srt/model.py"))
    path = Path(done.stem + ".patch")
    path.write_bytes(path.read_bytes().replace(b"+changed", b"+edited"))
    with pytest.raises(DiffDigestError):
        bench.result("p")
    assert [type(problem) for problem in bench.lint()] == [DiffDigestError]
    assert bench.pin("p").action == "pinned"
    assert bench.result("p") == {"engine/srt/model.py": MODEL.replace(b"line 20\n", b"edited\n")}
    assert bench.pin("p").action == "unchanged"


@pytest.mark.parametrize("state", ["missing", "broken"])
def test_pin_writes_a_manifest_that_is_missing_or_broken(bench, state):
    done = bench.import_(edit("engine/srt/model.py"))
    path = Path(done.stem + ".manifest.json")
    before = path.read_bytes()
    path.unlink() if state == "missing" else path.write_bytes(b"{")
    bench.pin("p")
    assert path.read_bytes() == before


def test_pin_adds_a_release_whose_files_are_the_same(tmp_path):
    Bench(tmp_path).import_(edit("engine/srt/model.py"))
    second = Bench(tmp_path, "1.1")
    done = second.pin("p")
    assert (done.action, done.manifest.releases) == ("extended", ("1.0", "1.1"))
    assert second.result("p") == {"engine/srt/model.py": CHANGED}


def test_pin_refuses_a_release_whose_files_differ(tmp_path):
    Bench(tmp_path).import_(edit("engine/srt/model.py"))
    second = Bench(tmp_path, "1.1")
    install(second.site, "engine", "1.1", {**FILES, "engine/srt/model.py": MODEL + b"more\n"})
    with pytest.raises(UnknownReleaseError):
        second.pin("p")


def test_a_refresh_that_touches_more_files_keeps_only_the_release_it_knows(tmp_path):
    bench = Bench(tmp_path)
    bench.import_(edit("engine/srt/model.py"))
    Bench(tmp_path, "1.1").pin("p")
    bench.new("p", "engine/srt/server.py")
    (bench.scratch() / "engine/srt/model.py").write_bytes(CHANGED + b"more\n")
    assert bench.refresh("p").manifest.releases == ("1.0", "1.1")
    (bench.scratch() / "engine/srt/server.py").write_bytes(b"x\n")
    done = bench.refresh("p")
    assert (done.manifest.releases, done.dropped) == (("1.0",), ("1.1",))


def test_a_manifest_with_other_pins_refuses_the_diff(bench):
    done = bench.import_(edit("engine/srt/model.py"))
    path = Path(done.stem + ".manifest.json")
    manifest = json.loads(path.read_bytes())
    manifest["files"][0]["after"]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(PinMismatchError):
        bench.result("p")


# -- lint -----------------------------------------------------------------------------------------


def toml(bench: Bench, name: str, **keys: object) -> None:
    folder = bench.patches / name
    folder.mkdir(exist_ok=True)
    lines = ["schema = 1", f'name = "{name}"', 'distribution = "engine"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    (folder / "patch.toml").write_text("\n".join(lines) + "\n")


def messages(bench: Bench) -> str:
    return "\n".join(str(problem) for problem in bench.lint())


def test_lint_names_cycles_unknown_names_and_contradictions(bench):
    for name in "abc":
        bench.import_(edit("engine/srt/model.py", at=5 * "abcd".index(name) + 5), name)
    toml(bench, "a", after=["b"])
    toml(bench, "b", after=["c"], conflicts=["c", "b"])
    toml(bench, "c", after=["a", "nobody"])
    toml(bench, "s", members=["a", "ghost"])
    toml(bench, "t", members=["u"])
    toml(bench, "u", members=["t"])
    toml(bench, "void")
    text = messages(bench)
    assert "after goes round in a circle: a -> b -> c -> a" in text
    assert "members goes round in a circle: t -> u -> t" in text
    assert "after names 'nobody'" in text
    assert "members names 'ghost'" in text
    assert "'c' is in after and in conflicts" in text
    assert "conflicts names the patch itself" in text
    assert "has neither a diff nor members" in text


def test_lint_names_lost_halves_and_foreign_manifests(bench):
    stem = Path(bench.import_(edit("engine/srt/model.py")).stem)
    manifest = Path(f"{stem}.manifest.json")
    lost = bench.patches / "lost"
    lost.mkdir()
    (lost / "x.patch").write_bytes(edit("engine/srt/model.py"))
    (bench.patches / "p/other.patch").write_bytes(edit("engine/srt/model.py"))
    (bench.patches / "p/third.manifest.json").write_bytes(manifest.read_bytes())
    changed = json.loads(manifest.read_bytes())
    changed.update(patch="q", distribution="llm", on=["ghost"], releases=["9"])
    (bench.patches / "p/fourth.manifest.json").write_text(json.dumps(changed))
    text = messages(bench)
    assert "no patch.toml" in text
    assert "other.patch: has no manifest" in text
    assert "pins third.patch, which is not there" in text
    assert "serves 1.0, and so does" in text
    assert "is for patch 'q'" in text
    assert "is for llm" in text
    assert "made on 'ghost'" in text
    assert "is not as 'patchkit pin p' writes it" in text


def test_lint_compares_the_manifest_with_the_diff(bench):
    new = b"--- /dev/null\n+++ b/engine/srt/n.py\n@@ -0,0 +1 @@\n+x\n"
    path = Path(bench.import_(edit("engine/srt/model.py") + new).stem + ".manifest.json")
    assert bench.lint() == []
    pinned = Manifest.from_json(path.read_bytes(), name="m")
    entry = json.loads(path.read_bytes())
    entry["files"][0]["path"] = "engine/other.py"
    path.write_text(json.dumps(entry))
    text = messages(bench)
    assert "engine/other.py is pinned but not changed" in text
    assert "engine/srt/model.py is changed by the diff but not pinned" in text
    entry = json.loads(pinned.to_json())
    entry["files"][1]["after"]["sha256"] = "0" * 64
    path.write_text(json.dumps(entry))
    assert "pinned to other bytes" in messages(bench)


def test_lint_reports_what_cannot_be_read_and_goes_on(bench):
    bench.import_(edit("engine/srt/model.py"))
    (bench.patches / "p/engine-1.0.manifest.json").write_bytes(b"\xff")
    (bench.patches / "q").mkdir()
    (bench.patches / "q/patch.toml").write_text("schema = [")
    problems = bench.lint()
    assert {type(problem) for problem in problems} >= {ManifestError}
    assert len(problems) == 2


# -- the commands ---------------------------------------------------------------------------------


def run(bench: Bench, *args: str, code: int = 0) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "patchkit",
        "--root",
        str(bench.site),
        "--patches",
        str(bench.patches),
        "--json",
    ]
    done = subprocess.run([*command, *args], capture_output=True, text=True, check=False, cwd=bench.folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_the_commands_from_import_to_lint(bench):
    (bench.folder / "x.diff").write_bytes(edit("python/engine/srt/model.py") + edit("docs/x.md"))
    error = run(bench, "import", "x.diff", "--name", "p", "--dist", "engine", code=4)
    assert error["errors"][0]["code"] == "outside-package"
    options = ["--dist", "engine", "--release", "1.0", "--only-package"]
    done = run(bench, "import", "x.diff", "--name", "p", *options)
    assert done["data"]["left_out"] == ["docs/x.md"]
    assert done["data"]["strip"] == 2
    assert run(bench, "pin", "p")["data"]["action"] == "unchanged"
    assert run(bench, "new", "p", "engine/srt/server.py")["data"]["added"] == [
        "engine/srt/model.py",
        "engine/srt/server.py",
    ]
    assert run(bench, "refresh", "p")["data"]["changed"] is False
    (bench.scratch() / "engine/srt/server.py").write_bytes(b"y\n")
    assert run(bench, "refresh", "p")["data"]["changed"] is True
    assert run(bench, "lint")["data"] == {"patches": ["p"], "problems": 0, "variants": 1}
    (bench.patches / "p/engine-1.0.patch").write_bytes(b"")
    broken = run(bench, "lint", code=4)
    assert broken["errors"][0]["code"] == "diff-digest"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["import", "nowhere.diff", "--name", "p", "--dist", "engine"], 2),
        (["import", ".", "--name", "p/../q", "--dist", "engine"], 2),
        (["import", ".", "--name", "p"], 2),
        (["import", ".", "--name", "p", "--dist", "not-there"], 4),
        (["new", "p", "engine/srt/model.py", "--dist", "engine", "--on", "ghost"], 2),
        (["refresh", "ghost"], 2),
        (["pin", "ghost"], 2),
        (["lint", "no-such-folder"], 2),
    ],
)
def test_mistakes_get_one_line_and_a_code(bench, args, code):
    assert len(run(bench, *args, code=code)["errors"]) == 1


def test_an_unreadable_diff_is_an_error_not_a_traceback(bench):
    os.mkfifo(bench.folder / "pipe")
    (bench.folder / "bin.diff").write_bytes(bytes(range(256)) * 50)
    error = run(bench, "import", "bin.diff", "--name", "p", "--dist", "engine", code=4)
    assert error["errors"][0]["code"] == "not-a-diff"


def test_a_new_file_in_a_new_folder_stays_where_its_path_says(bench):
    done = bench.import_(b"--- /dev/null\n+++ b/engine/extra/y.py\n@@ -0,0 +1 @@\n+a\n")
    assert [pin.path for pin in done.manifest.files] == ["engine/extra/y.py"]


def test_a_new_file_below_a_file_of_the_tree_is_refused(bench):
    with pytest.raises(DiffError, match="which is a file"):
        bench.import_(b"--- /dev/null\n+++ b/engine/data.bin/y\n@@ -0,0 +1 @@\n+a\n")


def test_a_diff_without_prefixes_may_change_two_packages(tmp_path):
    bench = Bench(tmp_path)
    install(bench.site, "engine", "1.0", {**FILES, "engine_kernels/__init__.py": b"a\n"})
    kernels = b"--- engine_kernels/__init__.py\n+++ engine_kernels/__init__.py\n@@ -1 +1 @@\n-a\n+b\n"
    models = edit("engine/srt/model.py").replace(b"a/", b"").replace(b"b/", b"")
    bench.import_(models + kernels)
    assert set(bench.result("p")) == {"engine/srt/model.py", "engine_kernels/__init__.py"}

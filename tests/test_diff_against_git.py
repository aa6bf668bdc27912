"""Our results beside those of the real git: the same bytes forward, the older bytes back.

``PATCHKIT_EXAMPLES`` sets how many random edits are tried (thousands with ``make differential``); the counts are printed with ``-s``.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
from collections import Counter

import pytest
import unidiff
from hypothesis import HealthCheck, given, settings, strategies as st

from patchkit import diff as d
from patchkit.diff.model import Content, Diff
from patchkit.diff.names import collision_key
from patchkit.manifest import Manifest, PinMismatchError

EXAMPLES = int(os.environ.get("PATCHKIT_EXAMPLES", "60"))
COUNTS: Counter[str] = Counter()
ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "LC_ALL": "C",
}
Tree = dict[str, Content]


@pytest.fixture(scope="module", autouse=True)
def _print_counts():
    yield
    print("\ndiffs compared with git:", dict(sorted(COUNTS.items())))


def git(folder, *args: str, stdin: bytes | None = None, codes: tuple[int, ...] = (0,)) -> bytes:
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.fileMode=true", *args]
    done = subprocess.run(command, cwd=folder, env=ENV, input=stdin, capture_output=True, check=False)
    assert done.returncode in codes, (command, done.stderr)
    return done.stdout


def write_tree(folder, files: Tree) -> None:
    for path, content in files.items():
        name = os.path.join(os.fsencode(folder), path.encode("utf-8", "surrogateescape"))
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content.data)
        os.chmod(name, content.mode)


def read_tree(folder) -> Tree:
    found = {}
    base = os.fsencode(folder)
    for top, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name != b".git"]
        for name in names:
            full = os.path.join(top, name)
            with open(full, "rb") as file:
                mode = 0o755 if stat.S_IMODE(os.stat(full).st_mode) & 0o100 else 0o644
                path = os.path.relpath(full, base).decode("utf-8", "surrogateescape")
                found[path] = Content(file.read(), mode)
    return found


def ours(parsed: Diff, files: Tree) -> Tree:
    result = {**files, **d.apply(parsed, files.get)}
    return {path: content for path, content in result.items() if content is not None}


def committed(folder, files: Tree) -> str:
    """A commit of exactly these files, made without a working tree."""
    lines = []
    for path, content in files.items():
        blob = git(folder, "hash-object", "-w", "--stdin", "--no-filters", stdin=content.data).strip()
        name = path.encode("utf-8", "surrogateescape")
        lines.append(b"100%o blob %s\t%s\0" % (content.mode, blob, name))
    # Only an index knows how to build the folders.
    git(folder, "read-tree", "--empty")
    info = b"".join(line.replace(b" blob ", b" ") for line in lines)
    git(folder, "update-index", "-z", "--index-info", stdin=info)
    return git(folder, "write-tree").strip().decode()


OPTIONS = [
    *([f"-U{lines}"] for lines in range(11)),
    ["--patience"],
    ["--histogram", "-W"],
    ["--minimal", "--no-prefix"],
    ["--full-index", "--src-prefix=x/y/", "--dst-prefix=z/w/"],
    ["--inter-hunk-context=5", "-U1"],
]

# diff -N dates a file that is not there to the epoch, in local time.
ZONES = ["UTC", "UTC+8", "UTC-5:45"]

# Few different lines, so that blocks repeat and a wrong place would match.
line = st.sampled_from(
    [
        b"a",
        b"b",
        b"",
        b" x",
        b"}",
        b"a\r",
        b"-- a/f",
        b"++ b/f",
        b"@@ -1 +1 @@",
        b"\\ No",
        b"\x0c",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xff",
        b"diff --git a/f b/f",
        b"# def f(x):",
    ]
)
text = st.tuples(st.lists(line, max_size=30), st.booleans()).map(
    lambda parts: b"\n".join(parts[0]) + (b"\n" if parts[1] and parts[0] else b"")
)
blob = st.one_of(text, text, text, st.binary(max_size=200).map(lambda data: data + b"\0"))
part = st.sampled_from(["f", "g.py", "a b", "é", 'q"', "t\tb", "\udcff", "-x", "n\nl", "dir", "b"])
path = st.lists(part, min_size=1, max_size=3).map("/".join)
mode = st.sampled_from([0o644, 0o644, 0o644, 0o755])
file_content = st.builds(Content, blob, mode)


def consistent(paths) -> bool:
    """Whether no path lies below another and none collide on another file system."""
    pieces = {"/".join(p.split("/")[: n + 1]) for p in paths for n in range(len(p.split("/")))}
    folders = {"/".join(p.split("/")[:n]) for p in paths for n in range(1, len(p.split("/")))}
    return len({collision_key(piece) for piece in pieces}) == len(pieces) and not folders & set(paths)


@st.composite
def pair_of_trees(draw) -> tuple[Tree, Tree]:
    old = draw(st.dictionaries(path, file_content, min_size=1, max_size=4))
    new = dict(old)
    for name in list(old):
        action = draw(st.sampled_from(["keep", "edit", "edit", "edit", "delete", "rename", "mode"]))
        content = old[name]
        if action == "edit":
            new[name] = Content(draw(edited(content.data)), content.mode)
        elif action == "delete":
            del new[name]
        elif action == "rename":
            del new[name]
            new[draw(path)] = Content(draw(edited(content.data)), content.mode)
        elif action == "mode":
            new[name] = Content(content.data, 0o755 if content.mode == 0o644 else 0o644)
    new.update(draw(st.dictionaries(path, file_content, max_size=1)))
    kept: set[str] = set()
    for name in {**old, **new}:
        if consistent({*kept, name}):
            kept.add(name)
    return tuple({name: files[name] for name in files if name in kept} for files in (old, new))


@st.composite
def edited(draw, data: bytes) -> bytes:
    if b"\0" in data:
        return draw(
            st.one_of(st.just(data), st.binary(max_size=40).map(lambda more: data[:20] + more + data[20:]))
        )
    lines = data.split(b"\n")
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 2))] = draw(st.lists(line, max_size=3))
    return b"\n".join(lines)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees=pair_of_trees(), options=st.sampled_from(OPTIONS), renames=st.booleans())
def test_random_edits_apply_as_git_made_them(tmp_path_factory, trees, options, renames):
    old, new = trees
    if old == new:
        COUNTS["left out: nothing changed"] += 1
        return
    folder = repository(tmp_path_factory)
    before, after = committed(folder, old), committed(folder, new)
    flags = ["--binary", "-M" if renames else "--no-renames", *options]
    patch = git(folder, "diff", *flags, before, after)
    strip = 0 if "--no-prefix" in options else 2 if any("prefix=x" in option for option in options) else 1
    parsed = d.parse(patch, strip=strip)
    assert ours(parsed, old) == new
    assert ours(d.reverse(parsed), new) == old
    COUNTS["random edits"] += 1
    for kind in {file.change for file in parsed.files}:
        COUNTS[f"random edits with {kind}"] += 1
    COUNTS["random edits with binary"] += any(file.forward is not None for file in parsed.files)

    if not any(file.forward is not None for file in parsed.files):
        assert witnessed(parsed, patch)
        COUNTS["random edits that unidiff reads alike"] += 1

    written = d.render(parsed)
    again = d.parse(written)
    assert ours(again, old) == new
    assert ours(d.reverse(again), new) == old
    assert d.render(again) == written


def witnessed(parsed: Diff, patch: bytes) -> bool:
    """Whether unidiff, an independent reader, finds the same numbers and lines in every hunk."""
    lines = [line + "\n" for line in patch.decode("latin-1").split("\n")[:-1]]
    for file in parsed.files:
        for hunk in file.hunks:
            count = sum(1 + (not entry.endswith(b"\n")) for entry in hunk.body)
            text = ["--- a/f\n", "+++ b/f\n", *lines[hunk.line - 1 : hunk.line + count]]
            (other,) = unidiff.PatchSet(text)[0]
            numbers = (other.source_start, other.source_length, other.target_start, other.target_length)
            if numbers != (hunk.old_start, hunk.old_count, hunk.new_start, hunk.new_count):
                return False
            body = [str(one) for one in other if one.line_type != "\\"]
            if [one[:-1] for one in body] != [
                entry.decode("latin-1").removesuffix("\n") for entry in hunk.body
            ]:
                return False
    return True


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees=pair_of_trees())
def test_what_we_write_git_applies_to_the_same_bytes(tmp_path_factory, trees):
    old, new = trees
    sections = [d.compare(name, old.get(name), new.get(name)) for name in sorted({**old, **new})]
    changed = tuple(section for section in sections if section is not None)
    patch = d.render(Diff("p", changed))
    if not changed:
        assert patch == b""
        return
    parsed = d.parse(patch)
    assert ours(parsed, old) == new
    assert ours(d.reverse(parsed), new) == old
    folder = tmp_path_factory.mktemp("apply")
    write_tree(folder, old)
    git(folder, "apply", "--binary", "--whitespace=nowarn", "-", stdin=patch)
    assert read_tree(folder) == new
    COUNTS["our diffs applied by git"] += 1
    shutil.rmtree(folder)


@pytest.mark.skipif(shutil.which("diff") is None, reason="needs GNU diff")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    trees=pair_of_trees(), context=st.sampled_from(["-U0", "-U1", "-U3", "-U9"]), zone=st.sampled_from(ZONES)
)
def test_what_gnu_diff_writes_applies_to_the_same_bytes(tmp_path_factory, trees, context, zone):
    # A plain diff knows no modes, and an empty file no difference from none.
    old, new = ({p: Content(c.data, 0o644) for p, c in files.items() if c.data} for files in trees)
    folder = tmp_path_factory.mktemp("gnu")
    for name, files in (("old", old), ("new", new)):
        (folder / name).mkdir()
        write_tree(folder / name, files)
    done = subprocess.run(
        ["diff", "-ruNa", context, "old", "new"],
        cwd=folder,
        env={**ENV, "TZ": zone},
        capture_output=True,
        check=False,
    )
    shutil.rmtree(folder)
    assert done.returncode in (0, 1), done.stderr
    if not done.stdout:
        assert old == new
        return
    parsed = d.parse(done.stdout)
    assert ours(parsed, old) == new
    assert ours(d.reverse(parsed), new) == old
    COUNTS["plain diffs of GNU diff"] += 1


_repository = None


def repository(tmp_path_factory):
    """One repository for all examples; objects of equal content are shared."""
    global _repository  # noqa: PLW0603
    if _repository is None or not _repository.exists():
        _repository = tmp_path_factory.mktemp("repository")
        git(_repository, "init", "-q")
    return _repository


def test_every_pair_of_commits_of_a_small_history(tmp_path):
    history = list(small_history(random.Random(20260101)))
    git(tmp_path, "init", "-q")
    trees = [committed(tmp_path, files) for files in history]
    for first, old in enumerate(history):
        for second, new in enumerate(history):
            if old == new:
                continue
            for options in (
                ["-U3"],
                ["-U0"],
                ["-U10", "--patience"],
                ["-U1", "-M10%"],
                ["-M", "--histogram"],
            ):
                patch = git(tmp_path, "diff", "--binary", *options, trees[first], trees[second])
                parsed = d.parse(patch)
                assert ours(parsed, old) == new
                assert ours(d.reverse(parsed), new) == old
                COUNTS["pairs of commits"] += 1


def small_history(chance: random.Random):
    """Commits in which functions move, files are renamed, deleted and brought back."""

    def source(seed: int) -> bytes:
        lines = [b"def f%d(x):\n    return x\n\n" % (n % 7) for n in range(seed, seed + 12)]
        return b"".join(lines)

    files = {f"pkg/m{n}.py": Content(source(n), 0o644) for n in range(4)}
    files["pkg/data.bin"] = Content(bytes(range(256)) * 8, 0o644)
    yield dict(files)
    for step in range(7):
        name = chance.choice(sorted(files))
        content = files[name]
        if step % 4 == 1:
            files[f"pkg/moved{step}"] = files.pop(name)
        elif step % 4 == 3:
            del files[name]
            files[f"pkg/new{step}.py"] = Content(source(step * 3), 0o755)
        else:
            middle = chance.randrange(len(content.data))
            files[name] = Content(content.data[:middle] + b"\n# edit\n" + content.data[middle:], content.mode)
        yield dict(files)


# -- mutation -------------------------------------------------------------------------------------


HEADERS = tuple(
    b"@@|index |old mode|new mode|new file|deleted|similarity|literal|delta|--- |+++ |diff |rename".split(
        b"|"
    )
)


def mutated(patch: bytes):
    """Every deletion, duplication and swap of a line, and every number of a header one up and down."""
    lines = patch.splitlines(keepends=True)
    for at in range(len(lines)):
        yield "deletion", b"".join(lines[:at] + lines[at + 1 :])
        yield "duplication", b"".join(lines[: at + 1] + lines[at:])
        if at + 1 < len(lines):
            yield "swap", b"".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]])
        if lines[at].startswith(HEADERS):
            for start, end in numbers(lines[at]):
                for step in (1, -1):
                    value = int(lines[at][start:end]) + step
                    if value >= 0:
                        line = lines[at][:start] + b"%d" % value + lines[at][end:]
                        yield "number", b"".join([*lines[:at], line, *lines[at + 1 :]])


def numbers(line: bytes):
    return [match.span() for match in re.finditer(rb"\d+", line)]


def test_no_mutation_of_a_patch_makes_other_bytes(tmp_path):
    history = list(small_history(random.Random(7)))
    git(tmp_path, "init", "-q")
    trees = [committed(tmp_path, files) for files in history]
    counts: Counter[str] = Counter()
    for first, second in [
        *((number, number + 1) for number in range(len(history) - 1)),
        (0, 5),
        (2, 7),
        (7, 0),
    ]:
        old, new = history[first], history[second]
        if old == new:
            continue
        plain = git(tmp_path, "diff", "--binary", "-M", trees[first], trees[second])
        no_git = b"".join(
            line
            for line in plain.splitlines(keepends=True)
            if not line.startswith((b"diff ", b"index ", b"similarity "))
        )
        patches = [
            plain,
            git(tmp_path, "diff", "--binary", "--no-renames", "-U0", trees[first], trees[second]),
        ]
        if b"mode" not in no_git and b"rename" not in no_git and b"GIT" not in no_git:
            patches.append(no_git)
        for patch in patches:
            manifest = Manifest.build(
                d.parse(patch), old.get, patch="p", distribution="x", releases=["1"], on=[], diff_bytes=patch
            )
            for kind, bad in mutated(patch):
                counts[judged(kind, bad, old, new, manifest)] += 1
    print("\nmutations:", dict(sorted(counts.items())))
    assert sum(counts.values()) > 1000
    assert not [outcome for outcome in counts if "OTHER" in outcome]


def judged(kind: str, patch: bytes, old: Tree, new: Tree, manifest: Manifest) -> str:
    """How a mutated patch ends: refused when read, refused by a pin, or the pinned result."""
    try:
        parsed = d.parse(patch)
        result = d.apply(parsed, old.get)
    except d.DiffError:
        return f"{kind}: refused by the diff"
    unpinned = {path: content for path, content in {**old, **result}.items() if content is not None}
    try:
        manifest.apply(parsed, old.get)
    except PinMismatchError:
        return (
            f"{kind}: refused by the manifest" if unpinned != new else f"{kind}: OTHER: refused though right"
        )
    return f"{kind}: the pinned result" if unpinned == new else f"{kind}: OTHER bytes"

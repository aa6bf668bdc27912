"""Writing diffs: git's format, no time stamps, and the same bytes for the same change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkit.diff import binary, comparison, names
from patchkit.diff.model import Binary, Content, Diff, FileDiff, Hunk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from patchkit.diff.model import Change

_EMPTY_ID = "0" * 40
_BINARY_PROBE = 8000  # git's: a NUL byte this early makes a file binary


def compare(
    path: str, old: Content | None, new: Content | None, *, source: str | None = None
) -> FileDiff | None:
    """The section that turns ``old`` (at ``source``, if it was renamed) into ``new``; None for no change.
    Only the execute bit of a mode counts, as in git.
    """
    if old is None and new is None:
        return None
    old_mode = None if old is None else _git_mode(old)
    new_mode = None if new is None else _git_mode(new)
    before, after = b"" if old is None else old.data, b"" if new is None else new.data
    change: Change = "rename" if source is not None else "modify"
    if old is None:
        change = "add"
    elif new is None:
        change = "delete"
    elif old_mode == new_mode:
        if before == after and source is None:
            return None
        old_mode = new_mode = None
    hunks: tuple[Hunk, ...] = ()
    forward = backward = None
    if b"\0" in before[:_BINARY_PROBE] or b"\0" in after[:_BINARY_PROBE]:
        if before != after:
            forward, backward = Binary(0, "literal", after), Binary(0, "literal", before)
    else:
        hunks = comparison.hunks(before, after)
    old_id = _EMPTY_ID if old is None else binary.blob_id(before, _EMPTY_ID)
    new_id = _EMPTY_ID if new is None else binary.blob_id(after, _EMPTY_ID)
    return FileDiff(path, change, source, 0, hunks, old_mode, new_mode, forward, backward, old_id, new_id)


def render(diff: Diff) -> bytes:
    """The diff as bytes, its sections in their order; ``parse(render(d))`` says what ``d`` says."""
    return b"".join(piece for file in diff.files for piece in _section(file))


def _git_mode(content: Content) -> int:
    return 0o755 if content.mode & 0o100 else 0o644


def _section(file: FileDiff) -> Iterator[bytes]:
    old_name, new_name = (path.encode("utf-8", "surrogateescape") for path in (file.old_path, file.path))
    a, b = names.quote(b"a/" + old_name), names.quote(b"b/" + new_name)
    yield b"diff --git %s %s\n" % (a, b)
    if file.change == "delete":
        yield b"deleted file mode 100%o\n" % (file.old_mode or 0o644)
    elif file.change == "add":
        yield b"new file mode 100%o\n" % (file.new_mode or 0o644)
    elif file.old_mode is not None and file.new_mode is not None:
        yield b"old mode 100%o\nnew mode 100%o\n" % (file.old_mode, file.new_mode)
    if file.source is not None:
        yield b"rename from %s\nrename to %s\n" % (names.quote(old_name), names.quote(new_name))
    # A rename without edits has one blob, and git leaves its index line out.
    if file.old_id is not None and file.new_id is not None and file.old_id != file.new_id:
        yield b"index %s..%s\n" % (file.old_id.encode(), file.new_id.encode())
    if file.forward is not None:
        yield b"GIT binary patch\n"
        yield from _half(file.forward)
        if file.backward is not None:
            yield from _half(file.backward)
    if file.hunks:
        yield b"--- %s\n" % (b"/dev/null" if file.change == "add" else _tabbed(a))
        yield b"+++ %s\n" % (b"/dev/null" if file.change == "delete" else _tabbed(b))
    for hunk in file.hunks:
        yield from _hunk(hunk)


def _tabbed(name: bytes) -> bytes:
    """A tab ends a name with spaces, or GNU patch would take what follows a space for a time stamp."""
    return name + b"\t" if b" " in name else name


def _half(patch: Binary) -> Iterator[bytes]:
    yield b"%s %d\n" % (patch.kind.encode(), len(patch.data))
    yield from binary.encode_lines(patch.data)
    yield b"\n"


def _hunk(hunk: Hunk) -> Iterator[bytes]:
    old, new = (
        b"%d" % start if count == 1 else b"%d,%d" % (start, count)
        for start, count in ((hunk.old_start, hunk.old_count), (hunk.new_start, hunk.new_count))
    )
    yield b"@@ -%s +%s @@%s\n" % (old, new, b" " + hunk.section if hunk.section else b"")
    for entry in hunk.body:
        yield entry if entry.endswith(b"\n") else entry + b"\n\\ No newline at end of file\n"

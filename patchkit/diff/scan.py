"""The strict scanner: every line of a patch is accounted for, or the patch is refused."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from patchkit.diff import binary, names
from patchkit.diff.errors import (
    DiffError,
    DiffTooLargeError,
    MalformedDiffError,
    NotADiffError,
    UnsafePathError,
    UnsupportedDiffError,
)
from patchkit.diff.hunks import is_header, is_signature, read_hunks
from patchkit.diff.model import Binary, Diff, FileDiff, Hunk, Unusable

if TYPE_CHECKING:
    from patchkit.diff.model import Change

MAX_PATCH = 64 << 20

# git's extended headers in the order in which git prints them.
_EXTENDED = (
    b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode ", b"similarity index ",
    b"dissimilarity index ", b"copy from ", b"copy to ", b"rename from ", b"rename to ", b"index ",
)  # fmt: skip
_INDEX = re.compile(rb"([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?")
# What can only be a piece of a section, and so must not pass for a commit message.
_PIECE = re.compile(
    rb"@@ -\d+(,\d+)? \+\d+|\+\+\+ |(old|new) mode \d{6}$|(new|deleted) file mode \d{6}$"
    rb"|GIT binary patch$|index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}( \d{6})?$"
)
_NO_DATA = re.compile(rb"(Binary files .* differ|Files .* differ)\r?$")
_MAIL = re.compile(rb"From [0-9a-f]{40,64} ")
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?(?: ([+-])(\d\d)(\d\d))?")
_BACKUP_SUFFIXES = (".orig", ".old", ".bak", "~")
_MODES = {b"100644": 0o644, b"100755": 0o755}


def parse(data: bytes, *, name: str = "patch", strip: int = 1, pass_over: bool = False) -> Diff:
    """Read a git or plain unified diff. ``strip`` leading components of each name are cut, as by
    ``patch -p``. Raises a ``DiffError`` for anything that is not exactly such a diff; with ``pass_over``,
    git's sections about symbolic links, submodules and binary files without data are listed as
    ``unusable`` instead, for a reader who may not want them anyway.
    """
    return _Scanner(data, name, strip, pass_over=pass_over).scan()


class _Scanner:
    def __init__(self, data: bytes, name: str, strip: int, *, pass_over: bool = False) -> None:
        self.name = name
        self.pass_over = pass_over
        self.unusable: list[Unusable] = []
        self.strip = strip
        if len(data) > MAX_PATCH:
            raise DiffTooLargeError(
                f"a patch of {len(data)} bytes; the limit is {MAX_PATCH}", patch=name, line=1
            )
        self.lines = data.split(b"\n")
        # The last piece is what follows the last newline: nothing, unless the file was cut.
        self.cut = self.lines.pop() != b""
        if self.cut:
            self.lines.append(data[data.rfind(b"\n") + 1 :])
        self.index = 0

    def scan(self) -> Diff:
        files: list[FileDiff] = []
        prose = True  # a commit message may precede a patch, never interrupt one
        while self.index < len(self.lines):
            line = self.lines[self.index]
            if line.startswith(b"diff --git "):
                files += self.usable_section()
                prose = False
            elif is_header(self.lines, self.index):
                files.append(self.plain_section())
                prose = False
            elif is_signature(self.lines, self.index) or _MAIL.match(line):
                prose = True
                self.index += 1
            else:
                self.between(line, prose=prose)
                self.index += 1
        if not files:
            if self.unusable:
                raise self.unusable[0].error
            what = "an empty patch" if not any(self.lines) else "text that is not a patch"
            raise NotADiffError(what, patch=self.name, line=1, hint="a unified diff is needed (git diff)")
        if self.cut and not prose:
            raise MalformedDiffError(
                "the last line has no newline: the patch is cut short",
                patch=self.name,
                line=len(self.lines),
                hint="if nothing is missing, end the file with a newline",
            )
        return Diff(self.name, tuple(files), tuple(self.unusable))

    def usable_section(self) -> list[FileDiff]:
        """The section of git's that begins here, or none if it is passed over."""
        start = self.index
        try:
            return [self.git_section()]
        except UnsupportedDiffError as error:
            if not self.pass_over:
                raise
            self.index = start + 1
            try:
                _, path = self.git_names(self.extended_headers(), None, start)
            except DiffError:
                raise error from None
            self.unusable.append(Unusable(path, error))
            if self.index < len(self.lines) and is_header(self.lines, self.index):
                self.index += 2
                self.hunks()
            elif self.peek() == b"GIT binary patch":
                self.binary_patch()
            elif _NO_DATA.match(self.peek()):
                self.index += 1
            return []

    def between(self, line: bytes, *, prose: bool) -> None:
        """Judge a line outside of all sections."""
        if _NO_DATA.match(line):
            raise self.unsupported("a binary file without its data", "make the diff with git diff --binary")
        if re.match(rb"Only in .+: .", line):
            raise self.unsupported(
                "the diff says that a file is new or gone, but not what is in it", "use diff -ruN"
            )
        if line.startswith((b"diff --cc ", b"diff --combined ", b"@@@ ")):
            raise self.unsupported("the combined diff of a merge", "diff against one parent")
        renames = line.startswith(b"rename from ") and self.peek(1).startswith(b"rename to ")
        if renames or _PIECE.match(line):
            raise self.malformed("this line belongs to a file section, but none has begun")
        known = not line.strip() or line.startswith((b"diff ", b"Index: ")) or not line.strip(b"=")
        if not known and not prose:
            raise self.malformed("text that belongs to no file section")

    # -- one file ---------------------------------------------------------------------------------

    def plain_section(self) -> FileDiff:
        start = self.index
        old, _ = self.header(self.lines[start], start)
        new, new_stamp = self.header(self.lines[start + 1], start + 1)
        self.index += 2
        hunks = self.hunks()
        if not hunks:
            raise self.malformed("a file header without a hunk", start)
        path = new if new is not None else old
        if path is None:
            raise self.malformed("both names are /dev/null", start)
        if old is not None and new is not None and old != new and not _is_backup(old, new):
            raise self.malformed(
                f"the header names two files, {names.show(old)} and {names.show(new)}",
                start,
                hint="check the strip level (-p); a rename needs git's 'rename from' lines",
            )
        alone = len(hunks) == 1
        is_new = alone and not hunks[0].old_count and hunks[0].old_start == 0
        is_gone = alone and not hunks[0].new_count and hunks[0].new_start == 0
        if old is None and not is_new:
            raise self.malformed("a new file with old lines", start)
        if (new is None or _is_epoch(new_stamp)) and not is_gone:
            raise self.malformed("a deleted file with new lines", start)
        if is_new:
            return FileDiff(path, "add", None, start + 1, hunks)
        if new is None or _is_epoch(new_stamp):
            return FileDiff(path, "delete", None, start + 1, hunks)
        return FileDiff(path, "modify", None, start + 1, hunks)

    def git_section(self) -> FileDiff:
        start = self.index
        self.index += 1
        said = self.extended_headers()
        old_id, new_id, old_mode, new_mode = self.facts(said, start)
        renamed = b"rename from " in said
        adds, deletes = b"new file mode " in said, b"deleted file mode " in said
        if adds + deletes + (renamed or b"old mode " in said) > 1:
            raise self.malformed("a file that is new, gone or changed at once", start)

        hunks: tuple[Hunk, ...] = ()
        forward = backward = None
        header: tuple[str | None, str | None] | None = None
        if self.index < len(self.lines) and is_header(self.lines, self.index):
            old, _ = self.header(self.lines[self.index], self.index)
            new, _ = self.header(self.lines[self.index + 1], self.index + 1)
            header = old, new
            at = self.index
            self.index += 2
            hunks = self.hunks()
            if not hunks:
                raise self.malformed("a file header without a hunk", at)
            if (old is None) != adds or (new is None) != deletes:
                raise self.malformed("/dev/null and git's 'file mode' line contradict each other", at)
        elif self.peek() == b"GIT binary patch":
            forward, backward = self.binary_patch()
            if old_id is None or new_id is None or {len(old_id), len(new_id)} not in ({40}, {64}):
                raise self.unsupported(
                    "a binary patch without full blob names", "make it with git diff --binary", start
                )
        elif _NO_DATA.match(self.peek()):
            raise self.unsupported("a binary file without its data", "make the diff with git diff --binary")

        source, path = self.git_names(said, header, start)
        whole = "new" if adds else "deleted"
        if (adds or deletes) and hunks:
            empty = (
                hunks[0].old_start or hunks[0].old_count if adds else hunks[0].new_start or hunks[0].new_count
            )
            if len(hunks) > 1 or empty:
                raise self.malformed(f"a {whole} file with lines on both sides", start)
        if not (hunks or forward or adds or deletes or renamed or b"old mode " in said):
            raise self.malformed("a file section that changes nothing", start)
        if not (hunks or forward) and _changes_content(old_id, new_id, deletes=deletes):
            raise self.malformed("the index line names other content, but the section has none", start)
        change: Change = "add" if adds else "delete" if deletes else "rename" if renamed else "modify"
        return FileDiff(
            path, change, source, start + 1, hunks, old_mode, new_mode, forward, backward, old_id, new_id
        )

    def extended_headers(self) -> dict[bytes, bytes]:
        """The header lines of git up to the body: key to value, each once and in git's order."""
        said: dict[bytes, bytes] = {}
        last = -1
        while self.index < len(self.lines):
            line = self.lines[self.index]
            if line.endswith(b"\r") and line.startswith(_EXTENDED):
                raise self.converted(self.index)
            order = next((n for n, key in enumerate(_EXTENDED) if line.startswith(key)), None)
            if order is None:
                break
            if order <= last:
                raise self.malformed("a header line twice or out of order")
            last = order
            said[_EXTENDED[order]] = line[len(_EXTENDED[order]) :]
            self.index += 1
        return said

    def facts(
        self, said: dict[bytes, bytes], start: int
    ) -> tuple[str | None, str | None, int | None, int | None]:
        """Check the header lines against each other; the blob names and modes that they state."""
        for one, other in ((b"old mode ", b"new mode "), (b"rename from ", b"rename to ")):
            if (one in said) != (other in said):
                raise self.malformed(f"'{one.decode().strip()}' and its counterpart come in pairs", start)
        if b"copy from " in said or b"copy to " in said:
            raise self.unsupported("a copied file", "make the diff without -C", start)
        for key in (b"similarity index ", b"dissimilarity index "):
            if key in said and not re.fullmatch(rb"(\d\d?|100)%", said[key]):
                raise self.malformed(f"'{key.decode().strip()}' without a percentage", start)
        if b"similarity index " in said and b"rename from " not in said:
            raise self.malformed("a similarity without a rename", start)
        old_id = new_id = None
        if b"index " in said:
            match = _INDEX.fullmatch(said[b"index "])
            if match is None:
                raise self.malformed("an index line without two blob names", start)
            old_id, new_id = match[1].decode(), match[2].decode()
            if match[3] is not None:
                self.mode(match[3], start)
        old_mode = new_mode = None
        for key in (b"old mode ", b"deleted file mode "):
            if key in said:
                old_mode = self.mode(said[key], start)
        for key in (b"new mode ", b"new file mode "):
            if key in said:
                new_mode = self.mode(said[key], start)
        if b"old mode " in said and old_mode == new_mode:
            raise self.malformed("a change of mode to the same mode", start)
        return old_id, new_id, old_mode, new_mode

    def mode(self, value: bytes, at: int) -> int:
        if value in _MODES:
            return _MODES[value]
        if value in (b"120000", b"160000"):
            what = "a symbolic link" if value == b"120000" else "a submodule"
            raise self.unsupported(what, "only regular files are patched", at)
        raise self.malformed(f"file mode {value.decode('latin-1')!r}; git has 100644 and 100755", at)

    def git_names(
        self, said: dict[bytes, bytes], header: tuple[str | None, str | None] | None, start: int
    ) -> tuple[str | None, str]:
        """The old path (of a rename) and the path, agreed on by all lines that name them."""
        rest = self.lines[start][len(b"diff --git ") :]
        try:
            pairs = names.git_pairs(rest)
            if b"rename from " in said:
                source, path = (names.whole_name(said[key]) for key in (b"rename from ", b"rename to "))
                return self.rename_names(pairs, source, path, header, start)
        except ValueError as error:
            raise self.malformed(str(error), start) from None
        known = None if header is None else header[1] if header[1] is not None else header[0]
        if header is not None and None not in header and header[0] != header[1]:
            raise self.malformed(
                f"the header names two files, {header[0]!r} and {header[1]!r}",
                start,
                hint="check the strip level (-p)",
            )
        found, reason = set(), None
        for pair in pairs:
            try:
                old, new = (names.stripped(one, self.strip) for one in pair)
            except ValueError as error:
                reason = str(error)
                continue
            if old == new:
                found.add(old)
        if known is not None and known in found:
            return None, known
        if known is None and len(found) == 1:
            return None, found.pop()
        if not found and reason is not None and len(pairs) == 1:
            raise UnsafePathError(reason, patch=self.name, line=start + 1)
        raise self.malformed(
            "the 'diff --git' line does not name the one file of this section",
            start,
            hint="check the strip level (-p)",
        )

    def rename_names(
        self,
        pairs: list[tuple[bytes, bytes]],
        source: bytes,
        path: bytes,
        header: tuple[str | None, str | None] | None,
        start: int,
    ) -> tuple[str, str]:
        """``rename from`` lacks the prefix (``a/``, or what git was told) that the header has, so it has as
        many components less to strip.
        """
        for old, new in pairs:
            depths = [_prefix_depth(old, source), _prefix_depth(new, path)]
            if None in depths:
                continue
            try:
                result = tuple(
                    names.stripped(name, max(self.strip - (depth or 0), 0))
                    for name, depth in zip((source, path), depths, strict=True)
                )
            except ValueError as error:
                raise UnsafePathError(str(error), patch=self.name, line=start + 1) from None
            if header not in (None, result):
                raise self.malformed("the names of a rename contradict each other", start)
            if result[0] == result[1]:
                raise self.malformed("a rename to the same name", start)
            return result[0], result[1]
        raise self.malformed("the names of a rename contradict each other", start)

    def header(self, line: bytes, at: int) -> tuple[str | None, bytes]:
        """Path (None for /dev/null) and time stamp of a ``---`` or ``+++`` line."""
        try:
            name, stamp = names.header_name(line[4:])
        except ValueError as error:
            raise self.malformed(str(error), at) from None
        if name == b"/dev/null" or (name.startswith(b"/dev/null ") and b"\t" not in line):
            return None, stamp
        if name.endswith(b"\r") and not line.startswith(b'"', 4):
            raise self.converted(at)
        try:
            return names.stripped(name, self.strip), stamp
        except ValueError as error:
            raise UnsafePathError(str(error), patch=self.name, line=at + 1) from None

    def hunks(self) -> tuple[Hunk, ...]:
        hunks, self.index = read_hunks(self.lines, self.index, self.name)
        return hunks

    # -- git binary -------------------------------------------------------------------------------

    def binary_patch(self) -> tuple[Binary, Binary | None]:
        self.index += 1
        forward = self.binary_half()
        if forward is None:
            raise self.malformed("a binary patch without data")
        return forward, self.binary_half()

    def binary_half(self) -> Binary | None:
        start = self.index
        match = re.fullmatch(rb"(literal|delta) (\d{1,10})", self.peek())
        if match is None:
            return None
        self.index += 1
        packed = []
        while self.peek():
            try:
                packed.append(binary.decode_line(self.peek()))
            except ValueError as error:
                raise self.malformed(str(error)) from None
            self.index += 1
        if self.index >= len(self.lines):
            raise self.malformed("binary data that is cut short", self.index - 1)
        self.index += 1  # the empty line that ends it
        try:
            data = binary.inflate(b"".join(packed), int(match[2]))
        except ValueError as error:
            if int(match[2]) > binary.MAX_CONTENT:
                raise DiffTooLargeError(str(error), patch=self.name, line=start + 1) from None
            raise self.malformed(str(error), start) from None
        return Binary(start + 1, match[1].decode(), data)

    # -- errors -----------------------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> bytes:
        at = self.index + ahead
        return self.lines[at] if at < len(self.lines) else b""

    def malformed(self, message: str, at: int | None = None, hint: str | None = None) -> DiffError:
        line = (self.index if at is None else at) + 1
        return MalformedDiffError(message, patch=self.name, line=line, hint=hint)

    def converted(self, at: int) -> DiffError:
        return self.malformed(
            "the patch's own header lines end in CRLF",
            at,
            hint="it was converted; get it again byte for byte (.gitattributes: *.patch -text)",
        )

    def unsupported(self, message: str, hint: str, at: int | None = None) -> DiffError:
        line = (self.index if at is None else at) + 1
        return UnsupportedDiffError(message, patch=self.name, line=line, hint=hint)


def _prefix_depth(whole: bytes, bare: bytes) -> int | None:
    """How many components ``whole`` has before ``bare``; None if it does not end with it."""
    if whole == bare:
        return 0
    return whole[: -len(bare)].count(b"/") if bare and whole.endswith(b"/" + bare) else None


def _changes_content(old_id: str | None, new_id: str | None, *, deletes: bool) -> bool:
    """Whether an index line is about other bytes before and after: no file counts as an empty one. A deletion
    may lack its body (``--irreversible-delete``); applying it refuses what is not empty.
    """
    if old_id is None or new_id is None or deletes:
        return False
    size = min(len(old_id), len(new_id))
    ids = [_blank(one)[:size] for one in (old_id, new_id)]
    return ids[0] != ids[1]


def _blank(blob: str) -> str:
    """The blob's name; that of the empty blob where there is none."""
    return binary.blob_id(b"", blob) if not blob.strip("0") else blob


def _is_backup(old: str, new: str) -> bool:
    """Whether the names are those of ``diff -u file.orig file``."""
    return any(old == new + suffix or new == old + suffix for suffix in _BACKUP_SUFFIXES)


def _is_epoch(stamp: bytes) -> bool:
    """Whether ``diff -N`` says with this time stamp that there is no such file: 1970-01-01 in UTC."""
    if stamp.startswith(b"(nonexistent)"):  # Subversion's word for it
        return True
    match = _STAMP.match(stamp)
    if match is None:
        return False
    try:
        moment = dt.datetime.strptime(match[1].decode(), "%Y-%m-%d %H:%M:%S").replace(tzinfo=dt.timezone.utc)
        if match[2] is not None:
            offset = dt.timedelta(hours=int(match[3]), minutes=int(match[4]))
            moment += offset if match[2] == b"-" else -offset
    except (ValueError, OverflowError):
        return False
    return moment.timestamp() == 0

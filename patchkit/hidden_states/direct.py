"""Write large files past the page cache, where the file system can."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

ALIGNMENT = 4096  # of a place in a file, a size and an address: what the blocks of every common disk divide
BUFFER_BYTES = 2 << 20


class DirectFile:
    """A new file, written from the start to the end.

    A data set is larger than memory. In the page cache it would take the place of what the server has there,
    and the copy into it would cost half as much as checking the sample. So whole blocks go from an aligned
    buffer to the disk (O_DIRECT), the last part the usual way. A file system that cannot do that (EINVAL)
    gets everything the usual way. Raises OSError.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self.direct = True
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            self.descriptor = os.open(path, flags, 0o666)
        self.buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # an address at the start of a page
        self.held = 0  # bytes of the buffer that are not in the file
        self.written = 0

    def fileno(self) -> int:
        return self.descriptor

    def tell(self) -> int:
        return self.written + self.held

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BUFFER_BYTES // 2):
            part = view[start : start + BUFFER_BYTES // 2]
            self.room(len(part))[:] = part
            self.filled(len(part))
        return len(view)

    def room(self, size: int) -> memoryview:
        """So many bytes to fill and hand in with ``filled``: no second copy of them is made."""
        if size > len(self.buffer) - self.held:
            self._put(self.held - self.held % ALIGNMENT)
        if size > len(self.buffer) - self.held:
            larger = memoryview(mmap.mmap(-1, self.held + size))
            larger[: self.held] = self.buffer[: self.held]
            self.buffer = larger
        return self.buffer[self.held : self.held + size]

    def filled(self, size: int) -> None:
        self.held += size

    def flush(self) -> None:
        """Write what is held. What follows a last part of a block can no longer be written directly."""
        if self.held % ALIGNMENT:
            self._put(self.held - self.held % ALIGNMENT)
            self._usual()
        self._put(self.held)

    def _put(self, size: int) -> None:
        """Write the first ``size`` bytes of the buffer, and move the rest to its start."""
        done = 0
        while done < size:
            try:
                done += os.write(self.descriptor, self.buffer[done:size])
            except OSError as error:
                if not self.direct or error.errno != errno.EINVAL:
                    raise
                self._usual()
        self.written += size
        rest = self.held - size
        self.buffer[:rest] = self.buffer[size : self.held]
        self.held = rest

    def _usual(self) -> None:
        if self.direct:
            self.direct = False
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def close(self) -> None:
        """Without a ``flush`` what is held is lost."""
        os.close(self.descriptor)

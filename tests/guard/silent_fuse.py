"""A file system (FUSE) of one file of 4 KiB that can be read, and that never says that a write is done.

python silent_fuse.py MOUNTPOINT: mounts itself there, prints a line, and serves until it is killed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, FLUSH, INIT, BATCH_FORGET = 1, 2, 3, 14, 15, 16, 25, 26, 42
SIZE = 4096
FOREVER = 1 << 30


def attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node == 1 else (0o100644, SIZE)
    return struct.pack("<6Q10I", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SIZE, 0)


def answer(code: int, node: int) -> bytes | None:
    if code == INIT:  # version, readahead, flags, background requests, largest write, ...
        return struct.pack("<4I2H2I2H8I", 7, 31, SIZE, 0, 4, 4, SIZE, 1, 1, 0, *[0] * 8)
    if code == LOOKUP:
        return struct.pack("<4Q2I", 2, 1, FOREVER, FOREVER, 0, 0) + attributes(2)
    if code == GETATTR:
        return struct.pack("<QII", FOREVER, 0, 0) + attributes(node)
    if code == OPEN:
        return struct.pack("<QIi", 1, 0, 0)
    if code == READ:
        return bytes(SIZE)
    return b"" if code in {FLUSH, 18} else None


def main() -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent", os.fsencode(sys.argv[1]), b"fuse", 6, options):
        print("refused", flush=True)
        sys.exit()
    print("mounted", flush=True)
    while True:
        request = os.read(device, 1 << 17)
        _, code, unique, node = struct.unpack_from("<IIQQ", request)
        if code in {WRITE, FORGET, BATCH_FORGET}:
            continue
        payload = answer(code, node)
        error = 0 if payload is not None else -38  # ENOSYS
        payload = payload or b""
        os.write(device, struct.pack("<IiQ", 16 + len(payload), error, unique) + payload)


if __name__ == "__main__":
    main()

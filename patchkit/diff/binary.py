"""git's binary patches: base85 lines, zlib, and the delta format of its packs."""

from __future__ import annotations

import base64
import hashlib
import zlib

MAX_CONTENT = 64 << 20
_LENGTHS = {
    letter: index for index, letter in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", 1)
}


def decode_line(line: bytes) -> bytes:
    """One base85 line: a letter for the number of bytes (A-Z, a-z: 1 to 52), then groups of five."""
    size = _LENGTHS.get(line[0]) if line else None
    if size is None:
        raise ValueError("not a line of binary data")
    if len(line) - 1 != (size + 3) // 4 * 5:
        raise ValueError("binary data of the wrong length")
    try:
        decoded = base64.b85decode(line[1:])
    except ValueError:
        raise ValueError("binary data that is not base85") from None
    if any(decoded[size:]):
        raise ValueError("binary data with a padding that is not zero")
    return decoded[:size]


def encode_lines(data: bytes) -> list[bytes]:
    """Deflated ``data`` as base85 lines."""
    packed = zlib.compress(data, 9)
    lines = []
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        letter = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[len(piece) - 1 : len(piece)]
        lines.append(letter + base64.b85encode(piece, pad=True) + b"\n")
    return lines


def inflate(packed: bytes, size: int) -> bytes:
    """Exactly ``size`` bytes from a complete zlib stream; never more memory than that."""
    if size > MAX_CONTENT:
        raise ValueError(f"binary data of {size} bytes; the limit is {MAX_CONTENT}")
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(f"binary data that does not inflate ({error})") from None
    if len(data) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"binary data that does not inflate to the {size} bytes it announces")
    return data


def apply_delta(delta: bytes, base: bytes) -> bytes:
    """The bytes that a pack delta makes of ``base``."""
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            if position >= len(delta) or shift > 35:
                raise ValueError("a truncated delta")
            byte = delta[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    if number() != len(base):
        raise ValueError("a delta against a file of another size")
    size = number()
    if size > MAX_CONTENT:
        raise ValueError(f"a delta that makes {size} bytes; the limit is {MAX_CONTENT}")
    pieces = []
    made = 0
    while position < len(delta):
        command = delta[position]
        position += 1
        if command & 0x80:
            values = []
            for bits in (range(4), range(4, 7)):
                value = 0
                for shift, bit in enumerate(bits):
                    if command >> bit & 1:
                        if position >= len(delta):
                            raise ValueError("a truncated delta")
                        value |= delta[position] << 8 * shift
                        position += 1
                values.append(value)
            offset, length = values[0], values[1] or 0x10000
            if offset + length > len(base):
                raise ValueError("a delta that copies past the end of the file")
            pieces.append(base[offset : offset + length])
        elif command:
            length = command
            if position + length > len(delta):
                raise ValueError("a truncated delta")
            pieces.append(delta[position : position + length])
            position += length
        else:
            raise ValueError("a delta with a reserved command")
        made += length
        if made > size:
            raise ValueError("a delta that makes more bytes than it announces")
    if made != size:
        raise ValueError("a delta that makes fewer bytes than it announces")
    return b"".join(pieces)


def blob_id(data: bytes, like: str) -> str:
    """The name that git gives a blob, in the hash whose names are as long as ``like`` (SHA-1, SHA-256)."""
    kind = "sha256" if len(like) == 64 else "sha1"
    digest = hashlib.new(kind, b"blob %d\0" % len(data), usedforsecurity=False)
    digest.update(data)
    return digest.hexdigest()

"""Takes records as a trainer would: reads each whole file, checks some, deletes both files.

``python -m bench.gpu.reader FOLDER`` runs until it gets a line on its standard input, then says what it took.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time

CHECK_EVERY = 16  # sha256 of each would take more time than the files do


def main() -> None:
    folder = sys.argv[1]
    stop = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    records = tokens = size = backlog = 0
    buffer = bytearray(256 << 20)
    while True:
        last = stop.is_set()
        names = [n for n in os.listdir(folder) if n.endswith(".json")] if os.path.isdir(folder) else []
        backlog = max(backlog, len(names))
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, encoding="utf-8") as entry_file:
                entry = json.load(entry_file)
            data = path[: -len("json")] + "pt"
            with open(data, "rb", buffering=0) as file:
                length = 0
                while got := file.readinto(memoryview(buffer)[length:]):
                    length += got
            if "sha256" in entry and records % CHECK_EVERY == 0:
                found = hashlib.sha256(memoryview(buffer)[:length]).hexdigest()
                assert found == entry["sha256"], f"{data} is not what its .json says"
            os.unlink(path)
            os.unlink(data)
            records, tokens, size = records + 1, tokens + entry["tokens"], size + length
        if last and not names:
            break
        time.sleep(0.01)
    print(json.dumps({"records": records, "tokens": tokens, "bytes": size, "largest_backlog": backlog}))


if __name__ == "__main__":
    main()

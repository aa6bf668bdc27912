"""Takes records as a trainer would: reads each whole file, checks some, deletes both files.

``python -m bench.gpu.reader FOLDER`` runs until it gets a line on its standard input, then says what it
took. One process cannot keep up with memory, several can: a backlog would hide what the dump costs.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

WORKERS = 4
CHECK_EVERY = 16  # sha256 of each would take more time than the files do
TOTALS = ("records", "tokens", "bytes", "largest_backlog")


def take(folder: str, worker: int, stop: Event) -> dict[str, int]:
    """Take this worker's share of the records until ``stop`` and nothing is left."""
    taken = dict.fromkeys(TOTALS, 0)
    buffer = bytearray(256 << 20)
    while True:
        last = stop.is_set()
        names = [name for name in os.listdir(folder) if name.endswith(".json")]
        mine = sorted(name for name in names if int(name[:-5].rpartition("-")[2]) % WORKERS == worker)
        taken["largest_backlog"] = max(taken["largest_backlog"], len(names))
        for name in mine:
            path = os.path.join(folder, name)
            with open(path, encoding="utf-8") as entry_file:
                entry = json.load(entry_file)
            data = path.removesuffix("json") + "pt"
            with open(data, "rb", buffering=0) as file:
                length = 0
                while got := file.readinto(memoryview(buffer)[length:]):
                    length += got
            if "sha256" in entry and taken["records"] % CHECK_EVERY == 0:
                found = hashlib.sha256(memoryview(buffer)[:length]).hexdigest()
                assert found == entry["sha256"], f"{data} is not what its .json says"
            os.unlink(path)
            os.unlink(data)
            taken["records"] += 1
            taken["tokens"] += entry["tokens"]
            taken["bytes"] += length
        if last and not mine:
            return taken
        time.sleep(0.01)


def main() -> None:
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    with multiprocessing.Manager() as manager, multiprocessing.Pool(WORKERS) as pool:
        stop = manager.Event()
        shares = [pool.apply_async(take, (folder, worker, stop)) for worker in range(WORKERS)]
        sys.stdin.readline()
        stop.set()
        done = [share.get() for share in shares]
    total = {name: sum(share[name] for share in done) for name in TOTALS}
    total["largest_backlog"] = max(share["largest_backlog"] for share in done)
    print(json.dumps(total))


if __name__ == "__main__":
    main()

"""Prefill load: prompts of random ids, one token out, a fixed number of requests in flight."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
import urllib.request

WINDOW_SECONDS = 10.0


def drive(
    url: str, *, seconds: float, length: int, concurrency: int, count: int | None = None, **fields: object
) -> tuple[float, list[float]]:
    """Tokens a second of the steady state, and of each ten seconds of it.

    New requests are sent for ``seconds``, or ``count`` of them.
    """
    done: list[float] = []
    lock = threading.Lock()
    numbers = iter(range(count if count is not None else 10**9))
    began = time.perf_counter()

    def client(seed: int) -> None:
        source = random.Random(seed)
        while time.perf_counter() - began < seconds:
            with lock:
                if next(numbers, None) is None:
                    return
            body = {
                "input_ids": [source.randrange(2, 32000) for _ in range(length)],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
                **fields,
            }
            request = urllib.request.Request(
                url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                while reply.read(1 << 22):
                    pass
            with lock:
                done.append(time.perf_counter())

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    # Only the steady state counts: not the first burst, not the end when requests run out.
    done.sort()
    base = done[min(concurrency, len(done) - 1)]
    end = began + seconds if count is None else done[-1]
    steady = [moment for moment in done if base < moment <= end]
    if not steady:
        return len(done) * length / (done[-1] - began), []
    windows = [0.0] * int((steady[-1] - base) / WINDOW_SECONDS)
    for moment in steady:
        index = int((moment - base) / WINDOW_SECONDS)
        if index < len(windows):
            windows[index] += length / WINDOW_SECONDS
    return length * _slope(steady), windows


def _slope(moments: list[float]) -> float:
    """Events a second, by least squares: they come in bursts, and a mean would depend on where it is cut."""
    if len(moments) < 2:
        return 0.0
    return statistics.linear_regression(moments, range(len(moments))).slope

"""Feed prompts to servers that dump, and pack what they dump while they run.

One event loop sends and watches; threads pack. Between the two stands the spool: a prompt is only sent
when its dump still fits under the limit, and a dump is only deleted once its sample is on the disk.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.errors import ManyErrors, PatchkitError
from patchkit.hidden_states.dump import RADIX_HINT
from patchkit.hidden_states.errors import (
    BadDumpError,
    BadSampleError,
    ForeignDumpError,
    ServerError,
    SpoolLimitError,
    need,
)
from patchkit.hidden_states.pack import in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from patchkit.hidden_states.dump import Prompt, Spool
    from patchkit.hidden_states.pack import Packed, Packer
    from patchkit.hidden_states.progress import Progress

SCAN_SECONDS = 0.05
TRIES = 4
MAX_ERRORS = 20
RECORD_OVERHEAD = 8192  # of a dump's two files beside the states and token ids
PIECE_TOKENS = 512  # no server prefills in smaller pieces than this


@dataclass
class Extraction:
    """Extracts every row that the growing data set lacks.

    ``alive`` raises when a launched server is gone; ``stall_seconds`` is how long an answered prompt's
    dump may take. Errors of single samples are collected and end the run only when there are many.
    """

    packer: Packer
    spool: Spool
    urls: Sequence[str]
    state_bytes: int  # of all chosen states of one token
    spool_limit: int
    concurrency: int
    progress: Progress
    alive: Callable[[], None] = lambda: None
    stall_seconds: float = 120.0
    request_seconds: float = 1800.0
    errors: list[PatchkitError] = field(default_factory=list)
    peak: int = 0  # bytes of dumps that may have existed at once

    def __post_init__(self) -> None:
        self.growing = self.packer.growing
        self.reserved: dict[int, int] = {}  # row -> bytes that its dump may take
        self.failed: set[int] = set()
        self.answered: set[int] = set()
        self.broken: BaseException | None = None  # the first failed request
        self.all_sent = False
        self.room = asyncio.Event()
        self.base = 0  # bytes in the spool that are not ours
        self.moved = time.monotonic()
        self.began = time.time()

    def cost(self, row: int) -> int:
        tokens = self.growing.plan.length(row)
        return tokens * (self.state_bytes + 8) + RECORD_OVERHEAD * (1 + tokens // PIECE_TOKENS)

    def drain(self) -> None:
        """Pack what an earlier run of this data set left in the spool, and nothing else that lies there."""
        foreign = 0
        # Before its first sample a data set does not know which server's states are its own.
        prompts = self.spool.prompts(self.growing.plan.find) if self.growing.known_origin() else ()
        for result in in_parallel(self._try_pack, prompts, self.packer.threads):
            if isinstance(result[2], ForeignDumpError):
                foreign += 1
            else:
                self._count(*result)
        if foreign:
            self.progress.say(
                f"{foreign} dumps of another server lie in {self.spool.folder}; they stay there"
            )
        self.spool.skip()

    def run(self) -> None:
        """Raises ServerError, BadSampleError, SpoolLimitError, OSError; what is packed stays packed."""
        self.progress.restart()
        self.base = self.spool.usage()
        largest = max(self.growing.missing, key=self.growing.plan.length, default=None)
        if largest is None:
            return
        if self.base + self.cost(largest) > self.spool_limit:
            raise SpoolLimitError(largest, self.base + self.cost(largest), self.spool_limit)
        with ThreadPoolExecutor(self.packer.threads, thread_name_prefix="pack") as self.pool:
            asyncio.run(self._run())
        if self.errors:
            raise ManyErrors(self.errors) if len(self.errors) > 1 else self.errors[0]

    async def _run(self) -> None:
        httpx = need("httpx")
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        async with httpx.AsyncClient(
            limits=limits, timeout=self.request_seconds, trust_env=False
        ) as self.client:
            tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._watch())]
            try:
                # Whichever fails first ends both; when all is sent, the watcher ends by itself.
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # -- sending -------------------------------------------------------------------------------

    async def _send_all(self) -> None:
        slots = asyncio.Semaphore(self.concurrency)
        load = dict.fromkeys(self.urls, 0)
        sent: set[str] = set()
        running: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            slots.release()
            if not task.cancelled() and task.exception() is not None and self.broken is None:
                self.broken = task.exception()

        try:
            for row in self.growing.missing:
                key = self.growing.plan.key(row)
                if key in sent:
                    continue  # an equal prompt's states serve all of its rows
                sent.add(key)
                await self._reserve(row)
                await slots.acquire()
                task = asyncio.create_task(self._send(row, load))
                running.add(task)
                task.add_done_callback(ended)
            if running:
                await asyncio.wait(running)
        finally:
            for task in list(running):
                task.cancel()
        self.all_sent = True

    async def _reserve(self, row: int) -> None:
        """Wait until the dump of ``row`` fits under the limit."""
        cost = self.cost(row)
        while self.reserved and self.base + sum(self.reserved.values()) + cost > self.spool_limit:
            self.room.clear()
            await self.room.wait()
        self.reserved[row] = cost
        self.peak = max(self.peak, self.base + sum(self.reserved.values()))

    async def _send(self, row: int, load: dict[str, int]) -> None:
        ids, _ = self.growing.plan.row(row)
        body = {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }
        url = min(load, key=lambda one: load[one])
        load[url] += 1
        try:
            answer = await self._post(url, body, row)
        finally:
            load[url] -= 1
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if isinstance(meta, dict) and meta.get("cached_tokens"):
            raise ServerError(
                f"{url} answered row {row} from its cache: {meta['cached_tokens']} rows are missing",
                RADIX_HINT,
            )
        self.answered.add(row)
        self.moved = time.monotonic()

    async def _post(self, url: str, body: dict[str, Any], row: int) -> Any:
        httpx = need("httpx")
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(2.0**attempt / 2)
            self.alive()
            try:
                reply = await self.client.post(f"{url}/generate", json=body)
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__} {error}".strip()
                continue
            if reply.status_code == 200:
                return reply.json()
            reason = f"{reply.status_code} {reply.text[:200]}"
            if reply.status_code < 500 and reply.status_code not in (408, 429):
                break
        line = self.growing.plan.line(row)
        raise ServerError(
            f"{url} did not take row {row} (line {line} of the input): {reason}", "use --resume"
        )

    # -- packing -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Pack dumps as they come, until every row is packed or given up."""
        while True:
            self.alive()
            if self.broken is not None:
                raise self.broken
            prompts = list(self.spool.prompts(self.growing.plan.find))
            if prompts:
                await self._pack(prompts)
                continue
            if self.all_sent and not self.reserved:
                return
            self._require_movement()
            await asyncio.sleep(SCAN_SECONDS)

    async def _pack(self, prompts: Sequence[Prompt]) -> None:
        loop = asyncio.get_running_loop()

        async def one(prompt: Prompt) -> None:
            self._count(*await loop.run_in_executor(self.pool, self._try_pack, prompt))

        await asyncio.gather(*(one(prompt) for prompt in prompts))

    def _try_pack(self, prompt: Prompt) -> tuple[Prompt, Packed | None, PatchkitError | None]:
        try:
            return prompt, self.packer.pack(prompt), None
        except ForeignDumpError as error:
            return prompt, None, error
        except (BadSampleError, BadDumpError) as error:
            # A wrong dump of a prompt of ours is no use: it goes, so that a resumed run asks for it again.
            if prompt.key is not None:
                prompt.delete()
            return prompt, None, error

    def _count(self, prompt: Prompt, packed: Packed | None, error: PatchkitError | None) -> None:
        self.moved = time.monotonic()
        self.room.set()
        if error is not None:
            self.errors.append(error)
            self.progress.add(errors=1)
            for row in self.growing.plan.find(prompt.key):
                self.reserved.pop(row, None)
            if len(self.errors) >= MAX_ERRORS or prompt.key is None or isinstance(error, ForeignDumpError):
                raise error
            return
        if packed is None:
            return
        for row in packed.wanted:
            self.reserved.pop(row, None)
            self.answered.discard(row)
        if packed.rows:
            self.progress.add(
                samples=len(packed.rows), tokens=packed.tokens * len(packed.rows), size=packed.size
            )

    def _require_movement(self) -> None:
        failures = self.spool.failures(since=self.began)
        if failures:
            raise ServerError(f"the server's dump has ended: {failures[0]}", "make room, then use --resume")
        waiting = self.answered & set(self.reserved)
        if waiting and time.monotonic() - self.moved > self.stall_seconds:
            raise ServerError(
                f"{len(waiting)} prompts were answered and not dumped (row {min(waiting)}) "
                f"to {self.spool.folder}",
                "is the server patched, and is this the folder that it dumps to?",
            )

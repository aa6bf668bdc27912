"""Dump chosen layers' hidden states of every prefill. Added to SGLang by the patch ``hsdump``.

R(k) is the residual stream that enters layer k, for n layers R(n) is the state after the last one,
before the final norm. Each piece of a request that is prefilled becomes ``NAME.pt``, a dict of
``input_ids`` (int64 [tokens]) and ``hidden_states`` (a list of [tokens, hidden], one per chosen k),
and then ``NAME.json``. The ``.json`` comes last and says everything else: a reader takes only what has one.

Nothing happens unless SGLANG_HS_DUMP_DIR names a folder. The other settings:

  SGLANG_HS_DUMP_LAYERS     chosen k, as "3,31,59,61"; default 3, n//2+1, n-2, n
  SGLANG_HS_DUMP_BUFFER_GB  host memory between the model and the files, default 4; when it is full,
                            prefill waits
  SGLANG_HS_DUMP_WRITERS    writer threads, default 6
  SGLANG_HS_DUMP_FSYNC      "never" (default) or "file": every file is on the disk before its .json is seen
  SGLANG_HS_DUMP_STALL_S    a full buffer that frees nothing for so long ends the dump, default 120

A configuration whose states would be wrong stops the server at start-up with a DumpRefusedError. A
failure later (a full disk, say) ends the dump, never the server: see ``status/NAME.json``.
"""

from __future__ import annotations

import os

FOLDER = os.environ.get("SGLANG_HS_DUMP_DIR", "")

if FOLDER:  # an inert dump loads nothing
    import array
    import atexit
    import collections
    import contextlib
    import ctypes
    import hashlib
    import json
    import logging
    import mmap
    import queue
    import signal
    import sys
    import threading
    import time

    import torch

    logger = logging.getLogger(__name__)

SCHEMA = 1
STATUS_BYTES = 16384  # reserved at start-up, so that a full disk can still say so
STATUS_SECONDS = 5.0  # between two accounts of a running dump
ALIGNMENT = 512
REMEMBERED_REQUESTS = 4096

SPLIT_ROWS = "each rank then has some of a prompt's rows only"
OTHER_REQUESTS = "rank 0 then sees its own requests only"
OUTSIDE = "layers then run outside the loop that is dumped"
COMPILED = "a replayed CUDA graph or compiled code does not run the Python code that dumps"

# Server arguments that make the states wrong: a test of the value, and why. An unknown name is unset.
REFUSED = {
    "attn_cp_size": (lambda v: v > 1, SPLIT_ROWS),
    "attn_dp_size": (lambda v: v > 1, OTHER_REQUESTS),  # what became of enable_dp_attention in 0.5.21
    "cuda_graph_config": (lambda v: prefill_backend(v) not in {"disabled", "none"}, COMPILED),
    "dcp_size": (lambda v: v > 1, SPLIT_ROWS),
    "disable_piecewise_cuda_graph": (lambda v: not v, COMPILED),
    "disaggregation_mode": (lambda v: v == "decode", "a decode server runs no prefill"),
    "dllm_algorithm": (bool, "a diffusion model's prefill is not causal"),
    "dwdp_size": (lambda v: v > 1, OTHER_REQUESTS),
    "enable_attn_tp_input_scattered": (bool, SPLIT_ROWS),
    "enable_deepep_moe": (bool, SPLIT_ROWS),
    "enable_dp_attention": (bool, OTHER_REQUESTS),
    "enable_dsa_prefill_context_parallel": (bool, SPLIT_ROWS),
    "enable_layernorm_sp": (bool, SPLIT_ROWS),
    "enable_mixed_chunk": (bool, "decode rows are mixed into prefill batches"),
    "enable_nsa_prefill_context_parallel": (bool, SPLIT_ROWS),
    "enable_pdmux": (bool, OUTSIDE),
    "enable_piecewise_cuda_graph": (bool, COMPILED),
    "enable_prefill_context_parallel": (bool, SPLIT_ROWS),
    "enable_prefill_cp": (bool, SPLIT_ROWS),
    "enable_torch_compile": (bool, COMPILED),
    "enable_two_batch_overlap": (bool, OUTSIDE),
    "moe_a2a_backend": (lambda v: str(v) != "none", SPLIT_ROWS),
    "moe_dense_tp_size": (lambda v: v == 1, SPLIT_ROWS),
    "pp_size": (lambda v: v > 1, "layers then live in other processes"),
    "speculative_algorithm": (
        lambda v: str(v).rpartition(".")[2].upper() != "NONE",
        "drafts are verified in batches that are not prefill",
    ),
}
ON_GPU_ONLY = {"cuda_graph_config", "disable_piecewise_cuda_graph", "enable_piecewise_cuda_graph"}


class DumpRefusedError(RuntimeError):
    """The dump would be wrong, or cannot start, with this server's configuration."""


class DumpFailedError(RuntimeError):
    """The dump met something after start-up that would make its files wrong."""


def attach(config, model_file):
    """The dump of the model that is being built, or None when no dump is wanted.

    ``config`` is the text model's Hugging Face config, ``model_file`` the patched source. Raises
    DumpRefusedError, which ends the server's start-up.
    """
    if not FOLDER:
        return None
    arguments = Arguments.of_caller()
    refuse_wrong_states(arguments)
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    layers = wanted_layers(config.num_hidden_layers)
    if get_tensor_model_parallel_rank() != 0:
        return Follower(layers)
    dump = Dump(layers, config.hidden_size, arguments, patch_digest(model_file))
    logger.info("hs_dump: dumping R(k) for k in %s to %s as %s", layers, FOLDER, dump.record_prefix)
    return dump


class Arguments:
    """The server's arguments as SGLang decided them, None where a release does not know the name."""

    def __init__(self, given):
        self.given = given
        self.decided = {}  # from 0.5.15 the record keeps what was asked for, and this beside it
        for _source, declared in getattr(given, "_resolved_overrides", None) or ():
            self.decided.update(declared)

    @classmethod
    def of_caller(cls):
        """Those of the model runner that builds the model: it is on the stack in every release."""
        frame = sys._getframe(1)
        while frame is not None:
            given = getattr(frame.f_locals.get("self"), "server_args", None)
            if hasattr(given, "model_path") and hasattr(given, "tp_size"):
                return cls(given)
            frame = frame.f_back
        raise DumpRefusedError("hs_dump: cannot find the server's arguments; is this a model runner?")

    def __getattr__(self, name):
        return self.decided[name] if name in self.decided else getattr(self.given, name, None)

    @property
    def on_gpu(self):
        return not str(self.device).startswith("cpu")


def refuse_wrong_states(arguments):
    for name, (is_wrong, reason) in REFUSED.items():
        value = getattr(arguments, name)
        if value is None or (name in ON_GPU_ONLY and not arguments.on_gpu):
            continue
        if is_wrong(value):
            if name == "cuda_graph_config":  # hundreds of numbers
                value = f"{prefill_backend(value)} for prefill"
            raise DumpRefusedError(
                f"hs_dump: refused with {name}={value}: {reason}; start the server without it, "
                "or unset SGLANG_HS_DUMP_DIR"
            )


def prefill_backend(config):
    """How prefill is made a CUDA graph, as text: from 0.5.14 a config says it for each phase."""
    return str(getattr(getattr(config, "prefill", None), "backend", None)).rpartition(".")[2].lower()


def wanted_layers(count):
    """The chosen k of R(k), ascending, from the environment or the default for ``count`` layers."""
    text = os.environ.get("SGLANG_HS_DUMP_LAYERS", "")
    try:
        chosen = [int(part) for part in text.split(",")] if text else [3, count // 2 + 1, count - 2, count]
    except ValueError:
        raise DumpRefusedError(f"hs_dump: SGLANG_HS_DUMP_LAYERS={text!r} is not a list of numbers") from None
    wrong = [k for k in chosen if not 0 <= k <= count]
    if wrong:
        raise DumpRefusedError(f"hs_dump: no R({wrong[0]}) in a model of {count} layers (0 to {count} exist)")
    return sorted(set(chosen))


def patch_digest(model_file):
    """sha256 over the ``sha256sum`` listing of the patched files, by path relative to the root."""
    import sglang

    root = os.path.dirname(os.path.dirname(os.path.realpath(sglang.__file__)))
    lines = []
    for path in sorted({os.path.realpath(__file__), os.path.realpath(model_file)}):
        with open(path, "rb") as source:
            lines.append(f"{hashlib.sha256(source.read()).hexdigest()}  {os.path.relpath(path, root)}\n")
    return hashlib.sha256("".join(sorted(lines, key=lambda line: line[66:])).encode()).hexdigest()


def setting(name, default, lowest):
    text = os.environ.get(name, "")
    try:
        value = type(default)(text) if text else default
    except ValueError:
        value = None
    if value is None or not value >= lowest:
        raise DumpRefusedError(f"hs_dump: {name}={text!r} must be a number of at least {lowest}")
    return value


def is_prefill(forward_batch):
    """Exactly EXTEND: ``is_extend()`` also holds for verification, mixed and draft batches."""
    return forward_batch.forward_mode.name == "EXTEND"


def residual_stream(hidden_states, residual, forward_batch):
    """R(k) as a tensor that nobody else writes to.

    ``residual`` is the second half of the sum, None before the first layer, or, from 0.5.21, the module
    that keeps it. A sum whose all-reduce SGLang has put off to the next layer is finished on a copy:
    every rank must get here, with the same k.
    """
    if hasattr(residual, "snapshot"):
        return residual.snapshot(hidden_states, forward_batch)
    if getattr(hidden_states, "_sglang_needs_allreduce_fusion", False):
        from sglang.srt.distributed.communication_op import tensor_model_parallel_all_reduce

        hidden_states = tensor_model_parallel_all_reduce(hidden_states.clone())
    return hidden_states.clone() if residual is None else hidden_states + residual


class Follower:
    """The other ranks' half of the sums that rank 0 needs whole."""

    def __init__(self, layers):
        self.layers = frozenset(layers)

    def capture(self, k, hidden_states, residual, forward_batch):
        if k in self.layers and is_prefill(forward_batch):
            residual_stream(hidden_states, residual, forward_batch)


class Dump:
    """Takes states from the model's thread; a collector and writers make files of them.

    The model's thread only adds, starts copies and waits for buffer space. The collector waits for the
    copies, in the order of the batches, and knows which pieces belong together. Writers write.
    """

    def __init__(self, layers, hidden_size, arguments, digest):
        import sglang

        self.layers = layers
        self.hidden_size = hidden_size
        self.fsync = os.environ.get("SGLANG_HS_DUMP_FSYNC", "") or "never"
        if self.fsync not in {"never", "file"}:
            raise DumpRefusedError(f'hs_dump: SGLANG_HS_DUMP_FSYNC={self.fsync!r} is not "never" or "file"')
        writers = setting("SGLANG_HS_DUMP_WRITERS", 6, 1)
        self.stall_seconds = setting("SGLANG_HS_DUMP_STALL_S", 120.0, 0.0)
        size = int(setting("SGLANG_HS_DUMP_BUFFER_GB", 4.0, 0.001) * 2**30)
        self.on_gpu = arguments.on_gpu
        # Several servers, on several hosts, may share the folder: a process id alone is not unique.
        self.record_prefix = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
        self.common = {
            "schema": SCHEMA,
            "layers": layers,
            "model_path": arguments.model_path,
            "patch_digest": digest,
            "release": sglang.__version__,
            "tp_size": arguments.tp_size,
        }
        self.lock = threading.RLock()  # SIGTERM may come while this thread holds it
        self.status_lock = threading.RLock()  # another one: the model never waits for the status file
        self.status_due = 0.0
        self.failure = None
        self.unfinished = {}  # name of a piece that is captured but not written yet: its token count
        self.written = {"records": 0, "tokens": 0, "bytes": 0}
        self.pieces = 0
        self.batch = None
        self.stopping = False
        try:
            os.makedirs(os.path.join(FOLDER, "status"), exist_ok=True)
            self.status_path = os.path.join(FOLDER, "status", self.record_prefix + ".json")
            with open(self.status_path, "xb") as status:
                status.write(b" " * STATUS_BYTES)
            self.write_status("running")
        except OSError as error:
            raise DumpRefusedError(f"hs_dump: cannot write to SGLANG_HS_DUMP_DIR: {error}") from None
        self.buffer = Buffer(size, pinned=self.on_gpu)
        self.copies = torch.cuda.Stream() if self.on_gpu else None
        self.requests = Requests()
        # One checksum is enough, and .json has a better one. Older torch cannot leave its own out.
        without_crc = getattr(torch.serialization, "set_crc32_options", None)
        if without_crc is not None:
            without_crc(False)
        self.batches = queue.SimpleQueue()  # bounded by the buffer
        self.jobs = queue.SimpleQueue()
        self.collector = threading.Thread(target=self.collect, name="hs_dump-collect", daemon=True)
        self.writers = [
            threading.Thread(target=self.write, name=f"hs_dump-write-{i}", daemon=True)
            for i in range(writers)
        ]
        for thread in (self.collector, *self.writers):
            thread.start()
        self.install_shutdown()

    # -- the model's thread --------------------------------------------------------------------

    def capture(self, k, hidden_states, residual, forward_batch):
        """Take R(k) of a prefill batch; called before layer k, and with k = n before the final norm."""
        if k not in self.layers or not is_prefill(forward_batch):
            return
        # Before any early return: with tensor parallelism the other ranks wait in this sum.
        total = residual_stream(hidden_states, residual, forward_batch)
        if self.failure is not None or self.stopping:
            return
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
            self.refuse_capture()
            return
        try:
            if k == self.layers[0]:
                if self.batch is not None:  # its forward did not reach the end
                    self.buffer.release(self.batch.region)
                self.batch = Batch(self, total, forward_batch)
            elif self.batch is None:
                return
            self.batch.take(k, total)
            if k == self.layers[-1]:
                batch, self.batch = self.batch, None
                batch.seal()
                self.batches.put(batch)
        except Exception as error:  # noqa: BLE001 (whatever it is, the server goes on)
            self.batch = None
            self.fail(error)

    def refuse_capture(self):
        """At start-up this ends the server; a graph captured later is no reason for that."""
        reason = f"prefill is captured as a CUDA graph: {COMPILED}"
        if not self.pieces:
            raise DumpRefusedError(f"hs_dump: {reason}; start the server with --disable-prefill-cuda-graph")
        self.fail(DumpFailedError(reason))

    def next_name(self):
        self.pieces += 1
        return f"{self.record_prefix}-{self.pieces - 1:08d}"

    # -- the collector -------------------------------------------------------------------------

    def collect(self):
        while True:
            batch = self.batches.get()
            if batch is None:
                for _ in self.writers:
                    self.jobs.put(None)
                return
            try:
                batch.wait()
                for piece in batch.pieces:
                    self.requests.identify(piece)
                    self.jobs.put(piece)
                self.requests.remember_order(batch.pieces)
            except Exception as error:  # noqa: BLE001
                self.fail(error)

    # -- the writers ---------------------------------------------------------------------------

    def write(self):
        while True:
            piece = self.jobs.get()
            if piece is None:
                return
            try:
                if self.failure is None:
                    size = self.write_record(piece)
                    with self.lock:
                        self.unfinished.pop(piece.name, None)
                        self.written["records"] += 1
                        self.written["tokens"] += piece.tokens
                        self.written["bytes"] += size
                    self.refresh_status()
            except Exception as error:  # noqa: BLE001
                self.fail(error)
            finally:
                piece.batch.written()

    def write_record(self, piece):
        """``.pt`` first, ``.json`` last, each under its name only when whole. Returns the bytes written."""
        data_path = os.path.join(FOLDER, piece.name + ".pt")
        fresh = os.path.join(FOLDER, f".{piece.name}.tmp")
        try:
            self.save(piece, fresh)
            size, digest = finish_file(fresh, sync=self.fsync == "file")
            os.rename(fresh, data_path)
            entry = json.dumps(
                {**self.common, **piece.entry(), "size": size, "sha256": digest}, sort_keys=True
            )
            with open(fresh, "w", encoding="utf-8") as out:
                out.write(entry + "\n")
                if self.fsync == "file":
                    out.flush()
                    os.fsync(out.fileno())
            os.rename(fresh, os.path.join(FOLDER, piece.name + ".json"))
        except BaseException:
            for path in (fresh, data_path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        if self.fsync == "file":
            sync_folder(FOLDER)
        return size

    def save(self, piece, path):
        try:
            torch.save({"input_ids": piece.input_ids, "hidden_states": piece.states()}, path)
        except RuntimeError:  # on a full disk it says "unexpected pos": ask the system for its own words
            with open(path, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, piece.tokens * piece.batch.row_bytes * len(self.layers))
            raise

    # -- the end -------------------------------------------------------------------------------

    def fail(self, error):
        """End the dump: nothing more is captured or written, the server goes on."""
        with self.lock:
            if self.failure is not None:
                return
            self.failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:1000]
        self.buffer.abandon()
        logger.error("hs_dump: the dump has ended, the server goes on: %s", self.failure)
        self.write_status("failed")

    def refresh_status(self):
        """Now and then, so that a server that is killed leaves an account that is not older than that."""
        if not self.status_lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self.status_due and self.failure is None and not self.stopping:
                self.write_status("running")
        finally:
            self.status_lock.release()

    def write_status(self, state):
        """Overwrite the reserved bytes in place: this needs no space on the disk."""
        with self.status_lock:
            self.status_due = time.monotonic() + STATUS_SECONDS
            self.put_status(state)

    def put_status(self, state):
        with self.lock:
            unfinished = dict(self.unfinished)
            report = {
                **self.common,
                "state": state,
                "error": self.failure,
                "pid": os.getpid(),
                "written": dict(self.written),
                "unfinished_count": len(unfinished),
                "unfinished_tokens": sum(unfinished.values()),
            }
        text = json.dumps(report, sort_keys=True).encode()[: STATUS_BYTES - 1]
        try:
            with open(self.status_path, "r+b") as status:
                status.write(text.ljust(STATUS_BYTES - 1) + b"\n")
        except OSError as error:
            logger.error("hs_dump: cannot write %s: %s", self.status_path, error)

    def install_shutdown(self):
        atexit.register(self.stop)
        if threading.current_thread() is not threading.main_thread():
            return
        earlier = signal.getsignal(signal.SIGTERM)

        def finish(number, frame):
            self.stop()
            if callable(earlier):
                earlier(number, frame)
            elif earlier != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, finish)

    def stop(self):
        """Write what is captured, then say what is not. Safe to call twice."""
        if self.stopping:
            return
        self.stopping = True
        self.batches.put(None)
        deadline = time.monotonic() + self.stall_seconds
        for thread in (self.collector, *self.writers):
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self.failure is None:
            self.write_status("stopped")
        with self.lock:
            left = len(self.unfinished)
        if left:
            logger.error("hs_dump: %d captured pieces were not written", left)
        logger.info("hs_dump: wrote %(records)d records, %(tokens)d tokens, %(bytes)d bytes", self.written)


class Batch:
    """One prefill batch on its way to the host: the rows of several requests, one after the other.

    Its region of the buffer holds one [rows, hidden] block for each chosen k and is given back when the
    last piece is written.
    """

    def __init__(self, dump, total, forward_batch):
        lengths = [int(n) for n in forward_batch.extend_seq_lens_cpu]
        prefixes = [int(n) for n in forward_batch.extend_prefix_lens_cpu]
        ids = forward_batch.input_ids
        self.dump = dump
        self.dtype = total.dtype
        self.rows = sum(lengths)
        self.kept = []  # GPU tensors must live until their copy is done
        self.copied = None
        if getattr(forward_batch, "can_run_tbo", False):
            raise DumpFailedError("a prefill runs as two overlapped batches")
        if total.shape != (self.rows, dump.hidden_size) or ids.shape[0] != self.rows:
            raise DumpFailedError(
                f"a prefill of {self.rows} tokens has states {tuple(total.shape)}, {ids.shape[0]} token ids"
            )
        self.row_bytes = dump.hidden_size * self.dtype.itemsize
        self.state_bytes = self.rows * self.row_bytes
        self.pieces = []
        row = 0
        rids = getattr(forward_batch, "rids", None) or [None] * len(lengths)
        for tokens, prefix, rid in zip(lengths, prefixes, rids):
            self.pieces.append(Piece(self, dump.next_name(), rid, row, tokens, prefix))
            row += tokens
        self.unwritten = len(self.pieces)
        with dump.lock:
            dump.unfinished.update((piece.name, piece.tokens) for piece in self.pieces)
        self.region = dump.buffer.take(self.state_bytes * len(dump.layers), dump.stall_seconds)
        self.take_identity(forward_batch, ids)

    def take_identity(self, forward_batch, ids):
        """Start the copies that tell which request a piece belongs to."""
        self.input_ids = self.to_host(ids.clone())
        totals = getattr(forward_batch, "orig_seq_lens", None)
        self.totals = None if totals is None else self.to_host(totals.clone())
        self.first_prefix = self.last_slots = None
        first, last = self.pieces[0], self.pieces[-1]
        pool = getattr(getattr(forward_batch, "req_to_token_pool", None), "req_to_token", None)
        slots = getattr(forward_batch, "out_cache_loc", None)
        if first.request_id is not None or pool is None or slots is None:
            return
        self.last_slots = self.to_host(slots[last.row : last.row + last.tokens].clone())
        if first.prefix:
            index = forward_batch.req_pool_indices[:1]
            self.first_prefix = self.to_host(pool[index, : first.prefix].reshape(-1))

    def take(self, k, total):
        """Start the copy of R(k), [rows, hidden]."""
        with self.side_stream():
            self.view(self.dump.layers.index(k), 0, self.rows).copy_(total, non_blocking=True)
        self.kept.append(total)

    def to_host(self, private):
        """Start a copy of a small tensor that nobody else writes to."""
        self.kept.append(private)
        with self.side_stream():
            return private.to("cpu", non_blocking=True)  # pinned, where there is something to pin for

    def side_stream(self):
        """On a GPU, copies run beside the next layers, after what is queued so far."""
        if not self.dump.on_gpu:
            return contextlib.nullcontext()
        self.dump.copies.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.dump.copies)

    def seal(self):
        """All states are on their way."""
        if self.dump.on_gpu:
            self.copied = torch.cuda.Event()
            self.copied.record(self.dump.copies)

    def wait(self):
        """Wait for the copies, and give each piece what they brought."""
        if self.copied is not None:
            self.copied.synchronize()
        self.kept.clear()
        ids = self.input_ids.to(torch.int64)
        for index, piece in enumerate(self.pieces):
            piece.input_ids = ids[piece.row : piece.row + piece.tokens].clone()
            if self.totals is not None:
                piece.prompt_tokens = int(self.totals[index])
        if self.first_prefix is not None:
            self.pieces[0].prefix_slots = self.first_prefix.tolist()
        if self.last_slots is not None:
            self.pieces[-1].slots = self.last_slots.tolist()

    def view(self, place, row, rows):
        """Rows of the state at ``place`` of the chosen ones, [rows, hidden], in the buffer.

        A tensor of its own over that memory, so that saving it saves these bytes and no more.
        """
        start = self.region[0] + place * self.state_bytes + row * self.row_bytes
        memory = torch.from_numpy(self.dump.buffer.array[start : start + rows * self.row_bytes])
        return memory.view(self.dtype).view(rows, self.dump.hidden_size)

    def written(self):
        """One piece is done with, written or given up."""
        with self.dump.lock:
            self.unwritten -= 1
            done = self.unwritten == 0
        if done:
            self.dump.buffer.release(self.region)


class Piece:
    """The rows of one request in one batch: one record."""

    def __init__(self, batch, name, request_id, row, tokens, prefix):
        self.batch = batch
        self.name = name
        self.request_id = request_id
        self.row = row  # where it starts in the batch
        self.tokens = tokens
        self.prefix = prefix  # tokens of the request that came before these
        self.input_ids = None
        self.prompt_tokens = None
        self.slots = self.prefix_slots = None
        self.chunk, self.previous, self.missing, self.sequence_sha256 = 0, None, prefix, None

    def states(self):
        """One [tokens, hidden] tensor for each chosen k."""
        count = len(self.batch.dump.layers)
        return [self.batch.view(place, self.row, self.tokens) for place in range(count)]

    def entry(self):
        """What ``.json`` says beside the dump's own facts."""
        dump = self.batch.dump
        count = len(dump.layers)
        end = self.prefix + self.tokens
        return {
            "chunk": self.chunk,
            "dtypes": [str(self.batch.dtype).rpartition(".")[2]] * count,
            "final": None if self.prompt_tokens is None else end >= self.prompt_tokens,
            "missing_rows": self.missing,
            "name": self.name,
            "prefix_length": self.prefix,
            "previous": self.previous,
            "prompt_tokens": self.prompt_tokens,
            "request_id": self.request_id,
            "sequence_sha256": self.sequence_sha256,
            "shapes": [[self.tokens, dump.hidden_size]] * count,
            "tokens": self.tokens,
        }


class Requests:
    """Which pieces belong together.

    With a request id, the piece that continues where the last one of that id ended. Without (before
    0.5.10), SGLang's scheduler cuts one prompt at a time and continues it first in the next batch: the
    first piece continues the last one of the batch before when its prefix is in exactly the cache slots
    that the earlier pieces were given. A prefix that nothing accounts for came from the radix cache: its
    rows are missing.
    """

    def __init__(self):
        self.by_id = collections.OrderedDict()
        self.last = None  # the chain that ends in the last piece of the batch before
        self.current = None

    def identify(self, piece):
        chain = self.find(piece)
        if chain is None:
            chain = Chain(piece)
        else:
            piece.chunk, piece.previous, piece.missing = chain.chunk + 1, chain.name, chain.missing
        chain.extend(piece)
        self.current = chain
        if piece.request_id is not None:
            self.by_id[piece.request_id] = chain
            self.by_id.move_to_end(piece.request_id)
            while len(self.by_id) > REMEMBERED_REQUESTS:
                self.by_id.popitem(last=False)

    def find(self, piece):
        if not piece.prefix:
            return None
        if piece.request_id is not None:
            chain = self.by_id.get(piece.request_id)
            return chain if chain is not None and chain.end == piece.prefix else None
        chain = self.last
        if chain is None or piece.prefix_slots is None or chain.slots is None:
            return None
        return (
            chain
            if chain.end == piece.prefix and chain.slots == piece.prefix_slots[chain.missing :]
            else None
        )

    def remember_order(self, pieces):
        self.last = self.current if pieces else self.last


class Chain:
    """The pieces of one request so far."""

    def __init__(self, piece):
        self.missing = piece.prefix
        self.end = piece.prefix
        self.slots = []
        self.digest = None if piece.prefix else hashlib.sha256()

    def extend(self, piece):
        self.chunk, self.name = piece.chunk, piece.name
        self.end += piece.tokens
        if piece.slots is None:
            self.slots = None
        elif self.slots is not None:
            self.slots = self.slots + piece.slots
        if self.digest is not None:
            self.digest.update(array.array("q", piece.input_ids.tolist()).tobytes())
            piece.sequence_sha256 = self.digest.hexdigest()


class Buffer:
    """A fixed piece of host memory, lent in regions: first fit, in order of address.

    A region is (start, size) in bytes of ``array``. ``take`` waits until there is room, which is
    what slows prefill down to the pace of the disk.
    """

    def __init__(self, size, *, pinned):
        self.pinned = pinned
        self.room = threading.Condition()
        self.abandoned = False
        self.allocate(size)

    def allocate(self, size):
        # The model is built under a default device, the GPU.
        self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
        self.array = self.memory.numpy()
        self.free = [(0, size)]
        self.size = size
        self.lent = 0

    def take(self, size, stall_seconds):
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        with self.room:
            deadline, seen = time.monotonic() + stall_seconds, self.lent
            while not self.abandoned:
                if size > self.size and self.lent == 0:
                    logger.warning("hs_dump: one prefill needs %d bytes, the buffer grows to that", size)
                    self.allocate(size)
                for index, (start, length) in enumerate(self.free):
                    if length >= size:
                        rest = [(start + size, length - size)] if length > size else []
                        self.free[index : index + 1] = rest
                        self.lent += 1
                        return start, size
                if self.lent != seen:
                    deadline, seen = time.monotonic() + stall_seconds, self.lent
                if not self.room.wait(timeout=max(0.0, deadline - time.monotonic())):
                    raise DumpFailedError(
                        f"the buffer was full and nothing was written for {stall_seconds:g} s"
                    )
        raise DumpFailedError("the dump has ended")

    def release(self, region):
        with self.room:
            self.lent -= 1
            self.free.append(region)
            self.free.sort()
            merged = [self.free[0]]
            for begin, length in self.free[1:]:
                before, span = merged[-1]
                if before + span == begin:
                    merged[-1] = (before, span + length)
                else:
                    merged.append((begin, length))
            self.free = merged
            self.room.notify_all()

    def abandon(self):
        with self.room:
            self.abandoned = True
            self.room.notify_all()


def finish_file(path, *, sync):
    """The size and sha256 of the file at ``path``, read in one call that leaves the interpreter free."""
    with open(path, "rb") as data:
        if sync:
            start_writeback(data.fileno())
        with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size, digest = len(content), hashlib.sha256(content).hexdigest()
        if sync:
            os.fsync(data.fileno())
    return size, digest


def start_writeback(descriptor):
    """Let the disk begin with a file's data while we do something else; fsync then waits for less."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        whole_file, write = ctypes.c_int64(0), 2  # SYNC_FILE_RANGE_WRITE
        begin(descriptor, whole_file, whole_file, write)


def sync_folder(path):
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

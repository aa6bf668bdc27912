"""The rows of a data set before and beside their states: an Arrow stream, mapped, never held in memory."""

from __future__ import annotations

import hashlib
from typing import IO, TYPE_CHECKING, Any

from patchkit.hidden_states.errors import DatasetError, need
from patchkit.hidden_states.files import durable
from patchkit.hidden_states.sample import sequence_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLUMNS = ("input_ids", "loss_mask", "seq_len")
_BATCH_TOKENS = 1 << 20  # Arrow's list offsets are 32 bits, and a batch is held in memory


class PlanWriter:
    """Appends rows; ``line`` is where a row came from in the input."""

    def __init__(self, file: IO[bytes], columns: Sequence[str] = (*COLUMNS, "line", "key")) -> None:
        self.arrow = need("pyarrow")
        kinds = {
            "input_ids": self.arrow.list_(self.arrow.int64()),
            "loss_mask": self.arrow.list_(self.arrow.int64()),
            "seq_len": self.arrow.int64(),
            "line": self.arrow.int64(),
            "key": self.arrow.binary(32),
        }
        self.schema = self.arrow.schema([(name, kinds[name]) for name in columns])
        self.stream = self.arrow.ipc.new_stream(file, self.schema)
        self.pending: dict[str, list[Any]] = {name: [] for name in columns}
        self.tokens = 0
        self.rows = 0

    def append(self, input_ids: Any, loss_mask: Any, line: int) -> None:
        row = {"input_ids": input_ids, "loss_mask": loss_mask, "seq_len": len(input_ids), "line": line}
        if "key" in self.pending:
            row["key"] = bytes.fromhex(sequence_key(input_ids))
        for name, values in self.pending.items():
            values.append(row[name])
        self.rows += 1
        self.tokens += len(input_ids)
        if self.tokens >= _BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        arrays = [self.arrow.array(self.pending[field.name], field.type) for field in self.schema]
        self.stream.write_batch(self.arrow.record_batch(arrays, schema=self.schema))
        for values in self.pending.values():
            values.clear()
        self.tokens = 0

    def close(self) -> None:
        if self.pending["seq_len"]:
            self._flush()
        self.stream.close()


class Plan:
    """A written plan, or the Arrow file of a ``speculators`` data set."""

    def __init__(self, path: str) -> None:
        arrow = need("pyarrow")
        self.path = path
        try:
            self.table = arrow.ipc.open_stream(arrow.memory_map(path)).read_all()
        except FileNotFoundError:
            raise DatasetError(path, "no such file") from None
        except arrow.lib.ArrowException as error:
            raise DatasetError(path, f"not an Arrow stream ({error})") from None
        missing = [name for name in COLUMNS if name not in self.table.column_names]
        if missing:
            raise DatasetError(path, f"has no column {missing[0]}")
        for name in COLUMNS:
            self._check_column(name)
        self.lengths = self.table["seq_len"].to_numpy()
        self._keys: Any = None

    def _check_column(self, name: str) -> None:
        arrow = need("pyarrow")
        column, kind = self.table[name], self.table.schema.field(name).type
        wanted = arrow.int64() if name == "seq_len" else arrow.list_(arrow.int64())
        if kind != wanted:
            raise DatasetError(self.path, f"its column {name} is {kind}, not {wanted}")
        parts = column.chunks if name == "seq_len" else [chunk.values for chunk in column.chunks]
        if column.null_count or any(part.null_count for part in parts):
            raise DatasetError(self.path, f"its column {name} has nulls")

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def length(self, row: int) -> int:
        return int(self.lengths[row])

    def line(self, row: int) -> int:
        return int(self.table["line"][row].as_py())

    def row(self, row: int) -> tuple[Any, Any]:
        """``input_ids`` and ``loss_mask`` of ``row``, int64 [T]; copies, so that nobody writes to the map."""
        torch = need("torch")
        columns = [self.table[name][row].values.to_numpy() for name in ("input_ids", "loss_mask")]
        ids, mask = (torch.from_numpy(column.copy()) for column in columns)
        return ids, mask

    def find(self, key: str | None) -> list[int]:
        """The rows whose token ids have this sha256, by sorted 64-bit prefixes: 16 bytes of memory a row."""
        numpy = need("numpy")
        if key is None:
            return []
        if self._keys is None:
            prefixes = numpy.empty(len(self), dtype=">u8")
            at = 0
            for chunk in self.table["key"].chunks:
                data = numpy.frombuffer(chunk.buffers()[1], dtype=numpy.uint8)
                data = data[chunk.offset * 32 : (chunk.offset + len(chunk)) * 32].reshape(-1, 32)
                prefixes[at : at + len(chunk)] = numpy.ascontiguousarray(data[:, :8]).view(">u8")[:, 0]
                at += len(chunk)
            order = numpy.argsort(prefixes, kind="stable")
            self._keys = prefixes[order], order
        prefixes, order = self._keys
        wanted = numpy.frombuffer(bytes.fromhex(key)[:8], dtype=">u8")[0]
        first = int(numpy.searchsorted(prefixes, wanted, "left"))
        last = int(numpy.searchsorted(prefixes, wanted, "right"))
        found = [int(one) for one in order[first:last]]
        return [one for one in found if self.key(one) == key]

    def key(self, row: int) -> str:
        return str(self.table["key"][row].as_py().hex())

    def digest(self) -> str:
        """sha256 over the token ids, masks and their bounds."""
        digest = hashlib.sha256()
        for batch in self.table.select(list(COLUMNS)).to_batches():
            for name in ("input_ids", "loss_mask"):
                digest.update(batch[name].flatten().to_numpy().data)
            digest.update(batch["seq_len"].to_numpy().data)
        return digest.hexdigest()

    def copy_to(self, file: IO[bytes], columns: Sequence[str]) -> None:
        arrow = need("pyarrow")
        chosen = self.table.select(list(columns))
        with arrow.ipc.new_stream(file, chosen.schema) as stream:
            for batch in chosen.to_batches():
                stream.write_batch(batch)


def write_plan(path: str, rows: Iterable[tuple[Any, Any, int]]) -> int:
    """Write (input_ids, loss_mask, line) rows to ``path``; returns how many."""
    with durable(path) as file:
        writer = PlanWriter(file)
        for ids, mask, line in rows:
            writer.append(ids, mask, line)
        writer.close()
    return writer.rows

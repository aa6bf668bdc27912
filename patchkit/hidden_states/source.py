"""Read the input: JSON lines, Parquet, or a ``speculators`` Arrow folder; one row after the other."""

from __future__ import annotations

import glob
import json
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.hidden_states.chat import ChatTokenizer, ConversationError
from patchkit.hidden_states.dump import file_sha256
from patchkit.hidden_states.errors import BadInputError, BadRowError, need

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = ("input_ids", "loss_mask", "messages", "conversations")
SHOWN_BAD_ROWS = 20


@dataclass
class Source:
    """The input file and what makes a row good.

    ``model`` is the checkpoint whose chat template conversations go through; ``max_length`` cuts rows to
    so many tokens, and none may fill the model's ``context``; ``samples`` ends
    after so many good rows. ``bad`` collects what was skipped.
    """

    path: str
    model: str | None = None
    vocab_size: int | None = None
    context: int | None = None
    max_length: int | None = None
    samples: int | None = None
    bad: list[BadRowError] = field(default_factory=list)
    cut: int = 0
    trust_remote_code: bool = False
    _chat: ChatTokenizer | None = None

    def rows(self, *, skip_bad: bool) -> Iterator[tuple[Any, Any, int]]:
        """(input_ids, loss_mask, line) of each good row.

        Bad ones are collected; without ``skip_bad`` they end in a BadInputError when all were looked at.
        """
        good = 0
        for line, values in self._raw():
            if self.samples is not None and good >= self.samples:
                break
            try:
                ids, mask = self._row(values)
            except (ConversationError, _RowError) as error:
                self.bad.append(BadRowError(self.path, line, str(error)))
                continue
            good += 1
            yield ids, mask, line
        if self.bad and not skip_bad:
            shown = "; ".join(f"line {one.line}: {one.reason}" for one in self.bad[:SHOWN_BAD_ROWS])
            more = f"; and {len(self.bad) - SHOWN_BAD_ROWS} more" if len(self.bad) > SHOWN_BAD_ROWS else ""
            raise BadInputError(
                self.path,
                f"{len(self.bad)} bad rows: {shown}{more}",
                "mend them, or leave them out with --skip-bad",
            )
        if not good:
            raise BadInputError(self.path, "has no usable row")

    def record(self) -> dict[str, Any]:
        """What the data set remembers of its input."""
        files = _arrow_files(self.path) if os.path.isdir(self.path) else [self.path]
        return {
            "files": {os.path.basename(one): file_sha256(one) for one in files},
            "skipped": [{"line": one.line, "reason": one.reason} for one in self.bad],
            "cut": self.cut,
            "max_length": self.max_length,
        }

    def _raw(self) -> Iterator[tuple[int, Any]]:
        if os.path.isdir(self.path):
            return self._arrow()
        try:
            # A pipe gives its rows once, and the input is read twice: for its rows and for its digest.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise BadInputError(self.path, "is not a regular file", "write the rows to a file first")
            with open(self.path, "rb") as file:
                magic = file.read(4)
        except FileNotFoundError:
            raise BadInputError(self.path, "no such file") from None
        return self._parquet() if magic == b"PAR1" else self._json_lines()

    def _json_lines(self) -> Iterator[tuple[int, Any]]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):
                    values = _RowError("not JSON")
                yield number, values

    def _parquet(self) -> Iterator[tuple[int, Any]]:
        arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        try:
            with parquet.ParquetFile(self.path) as file:
                names = [name for name in COLUMNS if name in file.schema_arrow.names]
                if not names:
                    raise BadInputError(self.path, f"has none of the columns {', '.join(COLUMNS)}")
                number = 0
                for batch in file.iter_batches(batch_size=256, columns=names):
                    for values in batch.to_pylist():
                        number += 1
                        yield number, values
        except arrow.lib.ArrowException as error:
            raise BadInputError(self.path, f"cannot be read as Parquet ({error})") from None

    def _arrow(self) -> Iterator[tuple[int, Any]]:
        arrow = need("pyarrow")
        number = 0
        for name in _arrow_files(self.path):
            try:
                stream = arrow.ipc.open_stream(arrow.memory_map(name))
                for batch in stream:
                    wanted = [one for one in COLUMNS if one in batch.schema.names]
                    for start in range(0, batch.num_rows, 256):
                        for values in batch.select(wanted).slice(start, 256).to_pylist():
                            number += 1
                            yield number, values
            except arrow.lib.ArrowException as error:
                raise BadInputError(name, f"cannot be read as an Arrow stream ({error})") from None

    def _row(self, values: Any) -> tuple[list[int], list[int]]:
        if isinstance(values, Exception):
            raise values
        if not isinstance(values, dict):
            raise _RowError("no object")
        if values.get("input_ids") is not None:
            ids, mask = self._tokens(values)
        else:
            conversation = values.get("messages")
            if conversation is None:
                conversation = values.get("conversations")
            if conversation is None:
                raise _RowError("has neither input_ids nor messages")
            if conversation == []:
                raise _RowError("its conversation has no messages")
            ids, mask = self._conversation(conversation)
        if self.max_length is not None and len(ids) > self.max_length:
            ids, mask = ids[: self.max_length], mask[: self.max_length]
            self.cut += 1
        if self.context is not None and len(ids) >= self.context:
            raise _RowError(f"{len(ids)} tokens, and the model's context is {self.context}; see --max-length")
        if not any(mask):
            raise _RowError("no token counts for the loss")
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise _RowError(f"token id {max(ids)} is not in the vocabulary of {self.vocab_size}")
        return ids, mask

    def _conversation(self, conversation: Any) -> tuple[list[int], list[int]]:
        if self._chat is None:
            if self.model is None:
                raise BadInputError(self.path, "has conversations", "name the model with --model")
            self._chat = ChatTokenizer(self.model, trust_remote_code=self.trust_remote_code)
        return self._chat.encode(conversation)

    @staticmethod
    def _tokens(values: dict[str, Any]) -> tuple[list[int], list[int]]:
        ids, mask = values["input_ids"], values.get("loss_mask")
        if not isinstance(ids, list) or not ids:
            raise _RowError("input_ids is empty or no list")
        if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise _RowError("input_ids has something that is no token id")
        if not isinstance(mask, list):
            raise _RowError("has input_ids but no loss_mask")
        if len(mask) != len(ids):
            raise _RowError(f"{len(mask)} values in loss_mask for {len(ids)} token ids")
        if not all(type(one) in (int, bool) and one in (0, 1) for one in mask):
            raise _RowError("loss_mask has values other than 0 and 1")
        return ids, [int(one) for one in mask]


class _RowError(ValueError):
    """Why a row is bad."""


def _arrow_files(folder: str) -> list[str]:
    """The data files of a saved data set, in the order that its ``state.json`` gives."""
    try:
        with open(os.path.join(folder, "state.json"), "rb") as file:
            names = [one["filename"] for one in json.loads(file.read())["_data_files"]]
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        names = sorted(
            os.path.basename(one) for one in glob.glob(os.path.join(glob.escape(folder), "*.arrow"))
        )
    if not names:
        raise BadInputError(folder, "has no Arrow data")
    return [os.path.join(folder, name) for name in names]

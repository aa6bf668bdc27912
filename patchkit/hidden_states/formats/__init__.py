"""The three on-disk formats behind one interface, and the table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from patchkit.hidden_states.formats.specforge import SpecForge
from patchkit.hidden_states.formats.speculators import Speculators
from patchkit.hidden_states.formats.speculators_v1 import SpeculatorsV1

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from patchkit.hidden_states.direct import DirectFile
    from patchkit.hidden_states.plan import Plan
    from patchkit.hidden_states.sample import Sample


class Format(Protocol):
    """One sample is one file; ``normed`` says on which side of the final norm the last state is.

    ``tokens`` are the (input_ids, loss_mask) that the data set has beside the sample's file, or None.
    """

    name: str
    normed: bool

    def path(self, row: int) -> str:
        """The file of ``row``, relative to the data set."""

    def size(self, tokens: int, states: int, hidden: int) -> int:
        """The least bytes that a sample's file has."""

    def write(self, file: DirectFile, sample: Sample) -> None: ...

    def read(self, path: str, layers: tuple[int, ...], tokens: Any) -> Sample:
        """The sample in the file at ``path``. Raises BadSampleError."""

    def tokens(self, folder: str) -> Plan | None:
        """Where the format keeps the tokens, if not in the samples' files."""

    def finish(self, folder: str, plan: Plan) -> None:
        """Write what the format has once for all samples."""

    def faults(self, folder: str, lengths: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(path, reason) for each file of ``finish`` that does not say what the samples are.

        ``lengths`` are the samples' tokens, by row.
        """


FORMATS: dict[str, Format] = {one.name: one for one in (Speculators(), SpeculatorsV1(), SpecForge())}
DEFAULT = Speculators.name

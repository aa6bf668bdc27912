"""The trainer's command line, made from what the data set says of itself."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkit.errors import USAGE, PatchkitError
from patchkit.hidden_states.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from patchkit.hidden_states.dataset import Dataset

SPECULATORS, SPECFORGE = "speculators", "specforge"
TRAINERS = (SPECULATORS, SPECFORGE)
# What a trainer's arguments may not say otherwise: it would train on something that was not validated.
_OURS = {
    SPECULATORS: (
        *("--verifier-name-or-path", "--data-path", "--save-path", "--target-layer-ids"),
        *("--d2t-path", "--t2d-path", "--hidden-states-path", "--draft-vocab-size", "--on-missing"),
    ),
    SPECFORGE: (
        "model.target_model_path",
        "data.hidden_states_path",
        "model.vocab_mapping_path",
        "output_dir",
    ),
}

_SPECFORGE_VALUED = ("-c", "--config", "--role", "--node-rank")


class TrainerError(PatchkitError):
    code = "bad-trainer"
    exit_code = USAGE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


@dataclass(frozen=True)
class Training:
    """One run of a trainer. ``entry`` is a script that stands in for the trainer's own module."""

    dataset: Dataset
    verifier: str
    save_path: str
    trainer: str
    python: str
    entry: str | None
    extra: Sequence[str]

    def command(self) -> list[str]:
        """The trainer's command. Raises TrainerError, DatasetError."""
        for argument in self.extra:
            if (name := _set_by_us(argument, self.trainer)) is not None:
                raise TrainerError(
                    f"{name} is set from the data set, and cannot be given as well",
                    "leave it out; its own option or the data set says it",
                )
        # Ours come last: of an argument that is given twice, the last one counts for both trainers.
        if self.trainer == SPECFORGE:
            options, overrides = _apart(self.extra)
            return [*self._start("specforge.cli"), "train", *options, *overrides, *self._specforge()]
        return [*self._start("speculators.train"), *self.extra, *self._speculators()]

    def release(self) -> str:
        """The trainer's version in its own environment. Raises TrainerError when it is not there."""
        probe = f"import importlib.metadata as m; print(m.version({self.trainer!r}))"
        try:
            done = subprocess.run([self.python, "-c", probe], capture_output=True, text=True, check=False)
        except OSError as error:
            raise TrainerError(f"--trainer-python {self.python}: {error.strerror or error}") from None
        if done.returncode:
            raise TrainerError(
                f"'{self.trainer}' is not installed for {self.python}",
                "name the interpreter of its environment with --trainer-python",
            )
        return done.stdout.strip()

    def _start(self, module: str) -> list[str]:
        return [self.python, self.entry] if self.entry else [self.python, "-m", module]

    def _speculators(self) -> list[str]:
        from patchkit.hidden_states.vocabulary import Mapping

        dataset = self.dataset
        if dataset.format.normed:
            raise DatasetError(
                dataset.folder,
                "has the last state after the norm, speculators needs it before",
                "train on the data set that this one was made of, or use --trainer specforge",
            )
        folder = os.path.abspath(dataset.folder)
        arguments = ["--verifier-name-or-path", self.verifier, "--data-path", folder]
        arguments += ["--save-path", os.path.abspath(self.save_path)]
        arguments += ["--target-layer-ids", *(str(k) for k in dataset.layers[:-1])]
        if dataset.format.name == "speculators-v1":
            if self.entry is None:
                raise TrainerError(
                    "speculators reads its older format only with its own scripts/train.py of 0.5 to 0.7",
                    "name that script with --trainer-entry, or convert: patchkit pack --format speculators",
                )
            arguments.append("--legacy-data")
        else:
            arguments += [
                "--hidden-states-path",
                os.path.join(folder, "hidden_states"),
                "--on-missing",
                "raise",
            ]
        mapping = dataset.vocabulary()
        if mapping is not None:
            # Always named: what lies about under a trainer's default name may be of another run.
            d2t, t2d = (os.path.abspath(path) for path in mapping)
            draft = len(Mapping.of(dataset).d2t)
            arguments += ["--d2t-path", d2t, "--t2d-path", t2d, "--draft-vocab-size", str(draft)]
        return arguments

    def _specforge(self) -> list[str]:
        from patchkit.hidden_states.vocabulary import Mapping

        dataset = self.dataset
        if not dataset.format.normed:
            raise DatasetError(
                dataset.folder,
                f"is in the format {dataset.format.name}",
                "convert it: patchkit pack --format specforge",
            )
        folder = os.path.abspath(dataset.folder)
        mapping = os.path.join(folder, "vocab_mapping", "vocab_mapping.pt")
        if not os.path.exists(mapping):
            raise DatasetError(folder, "has no vocabulary mapping", "patchkit vocab build makes it")
        Mapping.of(dataset)
        if not any(one in ("-c", "--config") or one.startswith("--config=") for one in self.extra):
            raise TrainerError(
                "specforge needs a run configuration", "give it after '--': -- --config run.yaml"
            )
        return [
            f"model.target_model_path={self.verifier}",
            f"model.vocab_mapping_path={mapping}",
            f"data.hidden_states_path={folder}",
            f"output_dir={os.path.abspath(self.save_path)}",
        ]


def _set_by_us(argument: str, trainer: str) -> str | None:
    """Which of our arguments this one sets; argparse takes an option's beginning for the whole of it."""
    name = argument.split("=", 1)[0]
    if trainer == SPECFORGE:
        return name if name in _OURS[trainer] and "=" in argument else None
    if not name.startswith("--") or len(name) == 2:
        return None
    return next((option for option in _OURS[trainer] if option.startswith(name)), None)


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """SpecForge's options, and the overrides: its parser takes these in one run, after the options only."""
    options: list[str] = []
    overrides: list[str] = []
    value_follows = False
    for argument in arguments:
        is_option = argument.startswith("-") or value_follows
        (options if is_option else overrides).append(argument)
        value_follows = not value_follows and argument in _SPECFORGE_VALUED
    return options, overrides


def read_config(folder: str) -> dict[str, object]:
    """A drafter's ``config.json``. Raises TrainerError."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as file:
            loaded = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise TrainerError(
            f"{folder}: no config.json there", "name the folder of a trained drafter"
        ) from None
    except (ValueError, RecursionError) as error:
        raise TrainerError(f"{path}: not JSON ({error})") from None
    if not isinstance(loaded, dict):
        raise TrainerError(f"{path}: no JSON object")
    return loaded

"""How serving releases read the layer ids of a drafter, and the config that says R(k) to each.

A data set and ``speculators`` name a state by the layer that it enters: k is R(k). SGLang's
``set_eagle3_layers_to_capture`` reads the list in ``eagle_config`` as layers whose *output* is meant, which
is R(k+1); for DeepSeek, and Kimi on top of it, it reads R(k) from 0.5.13 on, unless the first id is 1. The
first releases were looked up in the wheels from 0.4.6 to 0.5.16, and 0.5.23.
"""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from patchkit.errors import REFUSED, USAGE, PatchkitError
from patchkit.hidden_states.files import durable
from patchkit.training import TrainerError, read_config

Release = tuple[int, ...]
READS_ENTERING: Release = (0, 5, 13, 0, 0)  # DeepSeek: sglang #25454
_DEEPSEEK = ("DeepseekV2", "DeepseekV3", "DeepseekV32", "KimiK25")
# The first release in which an architecture takes a list of ids at all.
FIRST: dict[str, str] = {
    "LlamaForCausalLM": "0.4.9",
    "Qwen3ForCausalLM": "0.4.9",
    "Qwen3MoeForCausalLM": "0.4.9",
    "Qwen2ForCausalLM": "0.5.2rc0",
    "DeepseekV2ForCausalLM": "0.5.4.post2",
    "DeepseekV3ForCausalLM": "0.5.4.post2",
    "DeepseekV32ForCausalLM": "0.5.4.post2",
    "KimiK25ForConditionalGeneration": "0.5.10rc0",
}
LOOKED_AT = "0.5.23"
USUAL_STATES = 3
_HEADER_LIMIT = 16 << 20


class ServeError(PatchkitError):
    code = "bad-serve"
    exit_code = USAGE

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


class CannotSayError(PatchkitError):
    """The release has no way to be told these layers."""

    code = "cannot-serve"
    exit_code = REFUSED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)


@dataclass(frozen=True)
class Naming:
    """The ids to write for R(k), and the reason in a sentence."""

    ids: tuple[int, ...]
    reason: str
    checked: bool


def naming(layers: tuple[int, ...], architecture: str, release: str) -> Naming:
    """The ids that ``sglang==release`` reads as R(k) for k in ``layers`` when it serves ``architecture``.

    Raises ServeError, CannotSayError.
    """
    number = _number(release)
    # The engine captures in its layers' order, whatever the order of the list.
    if not layers or layers[0] < 0 or any(one >= other for one, other in pairwise(layers)):
        raise ServeError(
            f"the layers {_listed(layers)} cannot be served: they must ascend, each named once, from 0 on",
            "name those that the drafter was trained on: --layers 3,31,59",
        )
    first = FIRST.get(architecture)
    if first is None:
        raise CannotSayError(
            f"how sglang {release} reads the layer ids for {architecture} is not known here",
            f"known are {', '.join(FIRST)}",
        )
    if number < _number(first):
        raise CannotSayError(
            f"sglang {release} takes no layer ids for {architecture}, the first that does is {first}"
        )
    checked = number <= _number(LOOKED_AT)
    if architecture.startswith(_DEEPSEEK) and number >= READS_ENTERING:
        if layers[0] == 1:
            raise CannotSayError(
                f"sglang {release} reads ids that begin with 1 as one layer later, so R(1) cannot be named",
                "train on states that begin elsewhere",
            )
        return Naming(
            layers, f"sglang {release} reads k as R(k) for {architecture} (from 0.5.13 on)", checked
        )
    if layers[0] == 0:
        raise CannotSayError(f"sglang {release} names R(k) as k-1, so R(0) cannot be named")
    until = "before 0.5.13" if architecture.startswith(_DEEPSEEK) else "in every release looked at"
    return Naming(
        tuple(k - 1 for k in layers),
        f"sglang {release} reads k as the output of layer k, which is R(k+1), for {architecture} ({until})",
        checked,
    )


def _number(release: str) -> Release:
    """A sortable release: 0.5.10rc0 before 0.5.10 before 0.5.10.post1."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:(rc|\.post|\.dev)(\d+))?(?:\+.*)?", release)
    if match is None:
        raise ServeError(f"{release!r} is not a release of sglang", "write --serve sglang==0.5.9")
    rank = {None: 0, "rc": -1, ".dev": -2, ".post": 1}[match[4]]
    return (*(int(part) for part in match.groups()[:3]), rank, int(match[5] or 0))


def rewrite(
    folder: str, serve: str, layers: tuple[int, ...], architecture: str | None
) -> tuple[Naming, bool]:
    """Write ``eagle_config`` into the drafter's ``config.json``; returns whether that changed it.

    ``layers`` are the k of the states that it was trained on, () for what its config says, and must agree
    with what the drafter itself says; the architecture is the verifier's, from the config unless given.
    Raises TrainerError and as ``naming``.
    """
    engine, separator, release = serve.partition("==")
    if engine != "sglang" or not separator:
        raise ServeError(f"{serve!r} is not a release of sglang", "write --serve sglang==0.5.9")
    config = read_config(folder)
    if layers:
        _require_own(folder, config, layers)
    chosen = layers or _trained_on(config, folder)
    named = naming(chosen, architecture or _verifier(config, folder), release)
    before = config.get("eagle_config")
    eagle = dict(before) if isinstance(before, dict) else {}
    eagle.update({"eagle_aux_hidden_state_layer_ids": list(named.ids), "use_aux_hidden_state": True})
    if eagle == before:
        return named, False
    config["eagle_config"] = eagle
    with durable(os.path.join(folder, "config.json")) as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    return named, True


def _trained_on(config: dict[str, Any], folder: str) -> tuple[int, ...]:
    """Speculators writes R(k) as k, at the top level of its config."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise TrainerError(
            f"{folder}: its config does not say which states it was trained on", "name them with --layers"
        )
    return tuple(ids)


def _require_own(folder: str, config: dict[str, Any], layers: tuple[int, ...]) -> None:
    """Raise ServeError where the drafter was trained on other states than ``layers``.

    The mistake to find: a data set lists its last state, R(n), too, which no drafter takes.
    """
    if isinstance(config.get("speculators_config"), dict):
        trained = _trained_on(config, folder)
        if trained != layers:
            raise ServeError(
                f"{folder} was trained on the layers {_listed(trained)}, not {_listed(layers)}",
                "leave --layers out",
            )
        return
    states = _states_taken(folder, config)
    if states is not None and states != len(layers):
        taken = f"{folder} takes {states} states"
    elif states is None and len(layers) != USUAL_STATES:
        taken = f"{folder} does not say how many states it takes, drafters of EAGLE-3 take {USUAL_STATES}"
    else:
        return
    raise ServeError(
        f"{taken}, and --layers names {len(layers)}",
        "name those that it was trained on, without the data set's last state",
    )


def _states_taken(folder: str, config: dict[str, Any]) -> int | None:
    """How many states ``fc`` joins, by the header of ``model.safetensors``; None if that is not known."""
    width = config.get("target_hidden_size") or config.get("hidden_size")
    try:
        with open(os.path.join(folder, "model.safetensors"), "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, _HEADER_LIMIT)))
        (shape,) = [one["shape"] for name, one in header.items() if f".{name}".endswith(".fc.weight")]
        joined = shape[1]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error):
        return None
    if type(width) is not int or width < 1 or type(joined) is not int or joined % width:
        return None
    return joined // width


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _verifier(config: dict[str, Any], folder: str) -> str:
    own = config.get("speculators_config")
    verifier = own.get("verifier") if isinstance(own, dict) else None
    names = verifier.get("architectures") if isinstance(verifier, dict) else None
    if not isinstance(names, list) or not names:
        raise TrainerError(
            f"{folder}: its config does not name its verifier's architecture", "name it with --architecture"
        )
    return str(names[0])

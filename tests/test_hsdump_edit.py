"""The hsdump edit goes where it belongs, or nowhere."""

from __future__ import annotations

import pytest

from tools.hsdump.edit import EditError, defines_forward, with_dump

OLD = """\
import torch
from sglang.srt.layers.layernorm import RMSNorm


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = make(config)

    def forward(self, hidden_states, forward_batch):
        residual = None
        for i in range(len(self.layers)):
            layer = self.layers[i]
            hidden_states, residual = layer(hidden_states, residual)
        if not self.pp_group.is_last_rank:
            return hidden_states
        else:
            if not forward_batch.is_idle():
                if residual is None:
                    hidden_states = self.norm(hidden_states)
                else:
                    hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states
"""
ADDED = [
    "from sglang.srt import hs_dump",
    "        self.hs_dump = hs_dump.attach(config, __file__)",
    "            if self.hs_dump is not None:",
    "                self.hs_dump.capture(i, hidden_states, residual, forward_batch)",
    "            if self.hs_dump is not None:",
    "                self.hs_dump.capture(len(self.layers), hidden_states, residual, forward_batch)",
]


def test_the_calls_stand_before_each_layer_and_before_the_final_norm() -> None:
    edited = with_dump(OLD, "Model").split("\n")
    assert [line for line in edited if "hs_dump" in line] == ADDED
    for new, old in (
        (ADDED[0], "from sglang.srt.layers.layernorm import RMSNorm"),
        (ADDED[1], "        self.layers = make(config)"),
        (ADDED[3], "            layer = self.layers[i]"),
        (ADDED[5], "            if not forward_batch.is_idle():"),
    ):
        assert edited[edited.index(new) + 1] == old


def test_nothing_else_changes() -> None:
    edited = [line for line in with_dump(OLD, "Model").split("\n") if "hs_dump" not in line]
    assert edited == OLD.split("\n")


def test_the_stream_that_a_module_keeps_is_handed_over() -> None:
    new = OLD.replace("hidden_states, residual = layer(hidden_states, residual)", "hidden_states = layer(x)")
    new = new.replace("residual = None", "residual_batch.start(forward_batch)")
    start = new.index("                if residual is None")
    end = new.index("        return hidden_states\n", start)
    new = new[:start] + "                hidden_states = residual_batch.norm(self.norm)\n" + new[end:]
    assert with_dump(new, "Model").count("residual_batch, forward_batch)") == 2


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("class Model", "class Other", "0 classes Model"),
        ("sglang.srt.layers", "sglang.layers", "no import from sglang.srt"),
        ("super().__init__()", "pass", "does not call super"),
        ("self.layers[i]", "self.layers[j]", "self.layers[i]"),
        ("self.norm(", "self.other(", "self.norm"),
        ("residual", "rest", "neither residual nor residual_batch"),
        (
            "        return hidden_states\n",
            "        return self.norm(hidden_states)\n",
            "self.norm is used in more than one place",
        ),
    ],
)
def test_a_source_of_another_shape_is_refused(old: str, new: str, reason: str) -> None:
    assert old in OLD
    with pytest.raises(EditError) as caught:
        with_dump(OLD.replace(old, new), "Model")
    assert reason in str(caught.value)


def test_a_class_that_inherits_its_forward_is_not_the_one_to_edit() -> None:
    assert defines_forward(OLD, "Model")
    assert not defines_forward(OLD.replace("def forward", "def other"), "Model")

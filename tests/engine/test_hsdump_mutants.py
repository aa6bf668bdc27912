"""The comparison with Transformers can fail: each classic mistake, made on purpose, is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from examples.cpu_engine.server import PLAIN
from tests.engine.harness import (
    ALL_STATES,
    FLOAT32,
    Engine,
    compare,
    mismatches,
    patchkit,
    prompt,
    wait_for_rows,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

DUMP = "sglang/srt/hs_dump.py"
MODEL = "sglang/srt/models/deepseek_v2.py"
LAST = """\
            if self.hs_dump is not None:
                self.hs_dump.capture(len(self.layers), hidden_states, residual, forward_batch)
"""
END_OF_FORWARD = """\
        if len(aux_hidden_states) == 0:
            return hidden_states
        return hidden_states, aux_hidden_states
"""
COPY_NOW = """\
        with self.side_stream():
            self.view(self.dump.layers.index(k), 0, self.rows).copy_(total, non_blocking=True)
        self.kept.append(total)
"""
COPY_LATE = """\
        self.kept.append((k, total))
"""
SEAL = '''\
        """All states are on their way."""
'''
SEAL_LATE = """\
        for k, total in [kept for kept in self.kept if isinstance(kept, tuple)]:
            self.view(self.dump.layers.index(k), 0, self.rows).copy_(total)
"""
CLONE = "return hidden_states.clone() if residual is None"
NO_CLONE = "return hidden_states if residual is None"
# From 0.5.21 the copy is SGLang's own; without it, this is what would be handed over.
SNAPSHOT = "return residual.snapshot(hidden_states, forward_batch)"
NO_SNAPSHOT = """\
pending = residual.stream_of(forward_batch).pending
        return hidden_states if pending is None else residual.snapshot(hidden_states, forward_batch)"""
PUT_OFF = [(DUMP, COPY_NOW, COPY_LATE), (DUMP, SEAL, SEAL + SEAL_LATE)]
TOTAL = "        total = residual_stream(hidden_states, residual, forward_batch)\n        if self.failure"
NORMED = """\
        total = residual_stream(hidden_states, residual, forward_batch)
        if k == self.layers[-1]:
            total = sys._getframe(1).f_locals["self"].norm(total)
        if self.failure"""
GATE = "if k not in self.layers or not is_prefill(forward_batch):\n            return\n"
LATE_BY_ONE = f"""\
if k in (2, 3):
            if k == 2:
                return
            k = 2
        {GATE}"""


def dump_with(
    engine: Engine,
    folder: Path,
    edits: list[tuple[str, str, str]],
    *args: str,
    layers: str = ALL_STATES,
    **env: str,
) -> list[str]:
    """The mismatches of a dump by a patched tree with these edits (path, old text, new text) on top."""
    root = engine.copy_tree(folder / "root")
    patchkit("--root", root, "apply", "hsdump")
    for path, old, new in edits:
        text = (root / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (root / path).write_text(text.replace(old, new))
    ids = prompt(60)
    with engine.server(
        root,
        folder / "server.log",
        *PLAIN,
        FLOAT32,
        *args,
        **env,
        SGLANG_HS_DUMP_DIR=str(folder / "dump"),
        SGLANG_HS_DUMP_LAYERS=layers,
    ) as server:
        server.generate(ids)
        wait_for_rows(folder / "dump", len(ids))
    return mismatches(compare(engine, folder / "dump", [ids]))


def test_each_mistake_is_found_on_each_release(engine: Engine, tmp_path: Path) -> None:
    """Three mistakes in one copy of hs_dump.py, each in a state of its own; R(1) is as it should be."""
    edits = [(DUMP, GATE, LATE_BY_ONE), (DUMP, TOTAL, NORMED), *PUT_OFF]
    edits += [(DUMP, CLONE, NO_CLONE), (DUMP, SNAPSHOT, NO_SNAPSHOT)]
    wrong = dump_with(engine, tmp_path, edits, layers="0,1,2,4")
    assert [line.split(" is ")[0] for line in wrong] == [f"prompt 0: R({k})" for k in (0, 2, 4)]


def test_a_layer_off_by_one_is_found(engine_0_5_9: Engine, tmp_path: Path) -> None:
    edit = (DUMP, GATE, "k += 1\n        " + GATE)
    wrong = dump_with(engine_0_5_9, tmp_path, [edit], layers="1,2,3")
    assert [line.split(" is ")[0] for line in wrong] == [f"prompt 0: R({k})" for k in (1, 2, 3)]


def test_a_last_state_after_the_norm_is_found(engine_0_5_9: Engine, tmp_path: Path) -> None:
    late = "        if self.hs_dump is not None:\n            self.hs_dump.capture"
    late += "(len(self.layers), hidden_states, None, forward_batch)\n"
    edits = [(MODEL, LAST, ""), (MODEL, END_OF_FORWARD, late + END_OF_FORWARD)]
    wrong = dump_with(engine_0_5_9, tmp_path, edits)
    assert [line.split(" is ")[0] for line in wrong] == ["prompt 0: R(4)"]


@pytest.mark.parametrize(
    ("edits", "wrong_states"),
    [
        # On a GPU the copy runs beside the next layers, which write into the tensors that it reads. Here
        # the copy is put off by hand, and the CPU engine's norm writes in place as the CUDA kernel does.
        pytest.param([], [], id="kept"),
        pytest.param([(DUMP, CLONE, NO_CLONE)], ["prompt 0: R(0)"], id="missing"),
    ],
)
def test_a_missing_clone_is_found(
    engine_0_5_9: Engine, tmp_path: Path, edits: list[tuple[str, str, str]], wrong_states: list[str]
) -> None:
    wrong = dump_with(engine_0_5_9, tmp_path, [*PUT_OFF, *edits])
    assert [line.split(" is ")[0] for line in wrong] == wrong_states


@pytest.mark.parametrize(
    ("edits", "wrong_states"),
    [
        pytest.param([], [], id="finished"),
        pytest.param(
            [(DUMP, '"_sglang_needs_allreduce_fusion"', '"_no_such_mark"')],
            ["prompt 0: R(1)", "prompt 0: R(2)", "prompt 0: R(3)"],
            id="left",
        ),
    ],
)
def test_a_sum_over_ranks_that_is_put_off_is_finished(
    engine_0_5_9: Engine, tmp_path: Path, edits: list[tuple[str, str, str]], wrong_states: list[str]
) -> None:
    """With fused all-reduce a layer hands on its rank's part of the sum; R(k) needs the whole."""
    wrong = dump_with(
        engine_0_5_9,
        tmp_path,
        edits,
        "--tp=2",
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        CPU_ENGINE_DEFER_ALL_REDUCE="1",
    )
    assert [line.split(" is ")[0] for line in wrong] == wrong_states

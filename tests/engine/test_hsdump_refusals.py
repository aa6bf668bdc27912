"""Every configuration whose states would be wrong is refused, as each release reads its own arguments."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.engine.harness import Engine

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("refusals.py")
DUMP = "sglang/srt/hs_dump.py"
RIGHT = {
    "nothing asked": [],
    "tensor parallelism": ["--tp-size=2"],
    "plain data parallelism": ["--dp-size=2"],
    "chunked prefill": ["--chunked-prefill-size=64"],
    "no radix cache": ["--disable-radix-cache"],
    "fused all-reduce": ["--tp-size=2", "--enable-flashinfer-allreduce-fusion"],
}
# Each with the spellings that releases have used for it.
WRONG = {
    "pipeline parallelism": [["--pp-size=2"], ["--pipeline-parallel-size=2"]],
    "DP attention": [
        ["--tp-size=2", "--dp-size=2", "--enable-dp-attention"],
        ["--tp-size=2", "--attn-dp-size=2"],
    ],
    "two-batch overlap": [["--enable-two-batch-overlap"]],
    "attention context parallelism": [
        ["--tp-size=2", "--attn-cp-size=2"],
        ["--tp-size=2", "--attention-context-parallel-size=2"],
    ],
    "prefill context parallelism": [
        ["--tp-size=2", "--enable-nsa-prefill-context-parallel"],
        ["--tp-size=2", "--enable-prefill-context-parallel"],
        ["--tp-size=2", "--enable-prefill-cp", "--cp-strategy=zigzag"],
    ],
    "decode context parallelism": [
        ["--tp-size=2", "--dcp-size=2"],
        ["--tp-size=2", "--decode-context-parallel-size=2"],
    ],
    "CUDA graphs of prefill": [
        ["--enable-piecewise-cuda-graph"],
        ["--enforce-piecewise-cuda-graph"],
        ["--cuda-graph-backend-prefill=tc_piecewise"],
        ["--cuda-graph-backend-prefill=breakable"],
        ["--cuda-graph-backend-prefill=full"],
    ],
    "torch.compile": [["--enable-torch-compile"]],
    "speculative decoding": [
        ["--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=4"],
        [
            "--speculative-algorithm=EAGLE",
            "--speculative-draft-model-path=MODEL",
            "--speculative-num-steps=2",
            "--speculative-eagle-topk=1",
            "--speculative-num-draft-tokens=3",
        ],
    ],
    "mixed chunks": [["--enable-mixed-chunk", "--chunked-prefill-size=64"]],
    "all-to-all MoE": [["--tp-size=2", "--enable-deepep-moe"], ["--tp-size=2", "--moe-a2a-backend=deepep"]],
    "scattered dense layers": [["--tp-size=2", "--moe-dense-tp-size=1"]],
    "PD multiplexing": [["--enable-pdmux"]],
    "decode-only server": [["--disaggregation-mode=decode"]],
}
# Of each of these every release knows a spelling: a misspelt one would pass for one that none knows.
EVERYWHERE = (
    "pipeline parallelism",
    "DP attention",
    "torch.compile",
    "speculative decoding",
    "mixed chunks",
    "all-to-all MoE",
    "scattered dense layers",
    "decode-only server",
)
# What the server is asked for beside; parsing alone needs no GPU.
ON_A_GPU = ["--device=cuda", "--attention-backend=triton"]


@pytest.fixture(scope="module")
def answers(engine: Engine, patched: Path) -> dict[str, list[str]]:
    asked = {
        f"{name}: {' '.join(spelling)}": [
            argument.replace("MODEL", str(engine.model)) for argument in spelling
        ]
        for name, spellings in WRONG.items()
        for spelling in spellings
    }
    asked = {name: [*ON_A_GPU, *arguments] for name, arguments in (*RIGHT.items(), *asked.items())}
    task = {"model": str(engine.model), "dump": str(patched / DUMP), "configurations": asked}
    done = subprocess.run(
        [str(engine.python), str(SCRIPT)],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(patched), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_wrong_configuration_is_refused_by_one_line(answers: dict[str, list[str]]) -> None:
    known: dict[str, list[str]] = {}
    for name, (who, line) in answers.items():
        if name in RIGHT or who == "unknown":
            continue
        assert who in {"hsdump", "sglang"}, f"{name} is served"
        assert len(line.splitlines()) == 1
        if who == "hsdump":
            known.setdefault(name.partition(":")[0], []).append(line)
    missed = [name for name in EVERYWHERE if name not in known]
    assert missed == [], json.dumps(answers, indent=2)


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_right_configuration_is_not_refused(answers: dict[str, list[str]], name: str) -> None:
    who, line = answers[name]
    assert who != "hsdump", line
    if name != "fused all-reduce":  # SGLang has not always had it, and asks for its kernels
        assert who == "served", line

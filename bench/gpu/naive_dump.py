"""The dump that first comes to mind, to measure beside: copy and save inside the forward.

Stands in for ``hs_dump.py`` in a patched tree; the same calls, the same ``.pt`` files.
"""

from __future__ import annotations

import json
import os

import torch

FOLDER = os.environ.get("SGLANG_HS_DUMP_DIR", "")


def attach(config, _model_file):
    return NaiveDump(config.num_hidden_layers) if FOLDER else None


class NaiveDump:
    def __init__(self, count):
        os.makedirs(FOLDER, exist_ok=True)
        self.layers = sorted({3, count // 2 + 1, count - 2, count})
        self.states = []
        self.records = 0

    def capture(self, k, hidden_states, residual, forward_batch):
        if k not in self.layers or forward_batch.forward_mode.name != "EXTEND":
            return
        self.states.append((hidden_states if residual is None else hidden_states + residual).cpu())
        if k != self.layers[-1]:
            return
        row = 0
        for tokens in forward_batch.extend_seq_lens_cpu:
            rows = slice(row, row + tokens)
            ids = forward_batch.input_ids[rows].cpu()
            path = f"{FOLDER}/{self.records:08d}"
            torch.save(
                {"input_ids": ids, "hidden_states": [s[rows].clone() for s in self.states]}, path + ".pt"
            )
            with open(path + ".tmp", "w", encoding="utf-8") as out:
                json.dump({"name": f"{self.records:08d}", "tokens": int(tokens)}, out)
            os.rename(path + ".tmp", path + ".json")
            self.records += 1
            row += tokens
        self.states = []

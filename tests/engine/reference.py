"""Compare a dump with Hugging Face Transformers. Run by the engine's interpreter; JSON in, JSON out.

Input: ``model`` and ``folder`` (paths), ``prompts`` (lists of token ids). Output: for each prompt, a list of
the chains of records that are its rows::

    {"names": [...], "missing": rows that no record has, "errors": {k: error}, "next_best": {k: error}}

An error is the largest over the rows of |dumped - reference| / |reference|. ``next_best`` is the error that
the nearest wrong state of the reference (another k, or after the norm) would have: a comparison that cannot
tell them apart proves nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def reference_states(model, ids):
    """R(0) to R(n), and the normed last state, each [tokens, hidden] in fp32."""
    last = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    handle.remove()
    return [*(state[0] for state in states[:-1]), last[0].reshape(len(ids), -1), states[-1][0]]


def row_error(found, wanted):
    return ((found.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()


def chains(folder):
    """Each record with those before it of the same request, oldest first; checked against its own .json."""
    records = {}
    for path in sorted(Path(folder).glob("*.json")):
        entry = json.loads(path.read_text())
        data = (path.parent / f"{entry['name']}.pt").read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], path
        assert len(data) == entry["size"], path
        records[entry["name"]] = entry
    for entry in records.values():
        chain = [entry]
        while chain[0]["previous"] is not None:
            chain.insert(0, records[chain[0]["previous"]])
        assert [link["chunk"] for link in chain] == list(range(len(chain))), chain
        yield chain


def main():
    task = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    found = [[] for _ in task["prompts"]]
    for chain in chains(task["folder"]):
        data = [torch.load(Path(task["folder"]) / f"{entry['name']}.pt") for entry in chain]
        ids = torch.cat([piece["input_ids"] for piece in data]).tolist()
        missing = chain[0]["missing_rows"]
        for place, prompt in enumerate(task["prompts"]):
            if prompt[missing:] != ids:
                continue
            wanted = reference_states(model, prompt)
            if missing == 0:
                digest = hashlib.sha256(torch.tensor(prompt).numpy().tobytes()).hexdigest()
                assert chain[-1]["sequence_sha256"] == digest, chain[-1]
            errors, next_best = {}, {}
            for index, k in enumerate(chain[0]["layers"]):
                state = torch.cat([piece["hidden_states"][index] for piece in data])
                assert [list(state.shape)] == [[len(ids), chain[0]["shapes"][index][1]]]
                right = wanted[k][missing:]
                others = [other[missing:] for number, other in enumerate(wanted) if number != k]
                errors[k] = row_error(state, right)
                next_best[k] = min(row_error(other, right) for other in others)
            found[place].append(
                {
                    "names": [entry["name"] for entry in chain],
                    "missing": missing,
                    "errors": errors,
                    "next_best": next_best,
                }
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

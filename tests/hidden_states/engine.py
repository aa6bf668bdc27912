"""A small engine for tests: an HTTP server that dumps as the ``hsdump`` patches do, with made-up states.

The states are a function of the tokens, the position and k alone, so two runs give the same bytes. The last
one is before a norm whose weights the checkpoint that ``write_model`` makes has.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, VOCAB = 64, 8, 512
CHOSEN = [3, 5, 6, 8]
MODEL_PATH = os.environ.get("MODEL_PATH", "/models/tiny")


def states(ids: list[int], hidden: int = HIDDEN, chosen: list[int] = CHOSEN) -> list[torch.Tensor]:
    """bf16 [tokens, hidden] for each chosen k: like a residual stream, larger with k, each row its own."""
    tokens = torch.tensor(ids, dtype=torch.float64)
    past = torch.cumsum(tokens, 0).unsqueeze(1)
    channel = torch.arange(1, hidden + 1, dtype=torch.float64)
    size = 1 + (tokens % 7).unsqueeze(1) / 7
    return [
        (k * size * torch.sin(past * channel * 0.37 + k + tokens.unsqueeze(1))).to(torch.bfloat16)
        for k in chosen
    ]


def write_model(folder, hidden: int = HIDDEN) -> str:
    os.makedirs(folder, exist_ok=True)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    weight = 1 + torch.randn(hidden, generator=torch.Generator().manual_seed(7)) * 0.2
    save_file({"model.norm.weight": weight.to(torch.bfloat16)}, os.path.join(folder, "model.safetensors"))
    return str(folder)


class Dumper:
    """Writes records; ``chunk`` cuts prompts into pieces of so many tokens."""

    def __init__(self, folder, *, chunk: int | None = None, chosen=CHOSEN, hidden: int = HIDDEN):
        self.folder, self.chunk, self.chosen, self.hidden = str(folder), chunk, list(chosen), hidden
        self.prefix = f"20260101T000000-{os.urandom(4).hex()}"
        self.count = 0
        self.lock = threading.Lock()
        os.makedirs(self.folder, exist_ok=True)

    def dump(self, ids: list[int], *, missing: int = 0, values=None) -> list[str]:
        """Dump one prompt; returns the names of its records."""
        values = states(ids, self.hidden, self.chosen) if values is None else values
        step = self.chunk or len(ids)
        names: list[str] = []
        digest = hashlib.sha256()
        for number, start in enumerate(range(missing, len(ids), step)):
            end = min(len(ids), start + step)
            digest.update(torch.tensor(ids[start:end]).numpy().tobytes())
            with self.lock:
                name = f"{self.prefix}-{self.count:08d}"
                self.count += 1
            self._write(
                name,
                ids[start:end],
                [one[start:end].clone() for one in values],
                {
                    "chunk": number,
                    "final": end == len(ids),
                    "missing_rows": missing,
                    "prefix_length": start,
                    "previous": names[-1] if names else None,
                    "prompt_tokens": len(ids),
                    "sequence_sha256": None if missing else digest.hexdigest(),
                },
            )
            names.append(name)
        return names

    def _write(self, name: str, ids: list[int], values: list[torch.Tensor], facts: dict) -> None:
        fresh = os.path.join(self.folder, f".{name}.tmp")
        torch.save({"input_ids": torch.tensor(ids), "hidden_states": values}, fresh)
        with open(fresh, "rb") as file:
            content = file.read()
        os.rename(fresh, os.path.join(self.folder, name + ".pt"))
        entry = {
            "schema": 1,
            "layers": self.chosen,
            "model_path": MODEL_PATH,
            "patch_digest": "d" * 64,
            "release": "0.5.9",
            "tp_size": 1,
            "name": name,
            "request_id": None,
            "tokens": len(ids),
            "dtypes": ["bfloat16"] * len(values),
            "shapes": [list(one.shape) for one in values],
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            **facts,
        }
        with open(fresh, "w", encoding="utf-8") as file:
            json.dump(entry, file)
        os.rename(fresh, os.path.join(self.folder, name + ".json"))


def serve(port: int, folder: str, *, chunk: int | None = None, delay: float = 0.0) -> ThreadingHTTPServer:
    """``/health`` and ``/generate``; every prompt is dumped before it is answered."""
    dumper = Dumper(folder, chunk=chunk)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            known = {"/health": {}, "/get_model_info": {"model_path": MODEL_PATH}}
            if self.path in known:
                self.answer(known[self.path])
            else:
                self.answer({"error": "no such path"}, status=404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = body["input_ids"]
            if len(ids) > 4096:
                self.answer({"error": {"message": "The input is too long"}}, status=400)
                return
            time.sleep(delay)
            dumper.dump(ids)
            self.answer({"text": "", "meta_info": {"prompt_tokens": len(ids), "cached_tokens": 0}})

        def answer(self, value, status: int = 200):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    torch.set_num_threads(1)
    server = serve(
        int(sys.argv[1]), os.environ["SGLANG_HS_DUMP_DIR"], delay=float(os.environ.get("DELAY", "0"))
    )
    print(server.server_address[1], flush=True)
    server.serve_forever()

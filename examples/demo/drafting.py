"""The second part: extract, look, train; the engine is patched only while it serves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from examples.cpu_engine.server import ARGUMENTS, ENVIRONMENT
from examples.demo import browser
from examples.demo.account import require
from examples.trainers import venv

if TYPE_CHECKING:
    from examples.demo.account import Account

SAMPLES, LONGEST, VOCABULARY, DRAFT_VOCABULARY = 64, 90, 512, 128
TRAINER = "speculators-0.9.0"
ENTRY = Path(venv.__file__).with_name("cpu_speculators.py")
# What the trainer needs where there is no accelerator, and sizes that take seconds.
ON_CPU = (
    *("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--num-workers", "0"),
    *("--mask-token-id", "0", "--epochs", "1", "--total-seq-len", "512"),
)


def show(account: Account, model: Path, work: Path) -> None:
    dataset, drafter = work / "dataset", work / "drafter"
    account.title(f"Extract {SAMPLES} samples; the engine is patched only while its server runs")
    account.patchkit(
        *("extract", "--model", model, "--data", write_input(work / "samples.jsonl"), "--out", dataset),
        *(f"--server-arg={one}" for one in ARGUMENTS if not one.startswith("--host")),
        expect=0,
        env=ENVIRONMENT,
        last=8,
    )
    account.patchkit("check", expect=0)

    account.title("Every file of the data set is what was dumped, and what the model computes")
    output = account.patchkit("validate", dataset, "--recompute", "8", expect=0, last=8)
    require(f"{SAMPLES} samples" in output, f"validate does not count {SAMPLES} samples")

    account.title("Look at it")
    account.patchkit("report", dataset, expect=0)
    account.say(browser.look_at(dataset / "report.html", work))

    account.title(f"Train a drafter with {TRAINER.replace('-', ' ')}, on the clean tree")
    account.patchkit("vocab", "build", dataset, "--draft-size", str(DRAFT_VOCABULARY), expect=0)
    account.patchkit(
        *("train", "--dataset", dataset, "--verifier", model, "--save-path", drafter),
        *("--trainer-python", venv.ensure(TRAINER), "--trainer-entry", ENTRY),
        *("--", *ON_CPU),
        expect=0,
        last=12,
    )
    account.patchkit("check", expect=0)

    account.title("Name the layers as the serving release reads them")
    trained = drafter / "0"
    account.patchkit("drafter", "config", trained, "--serve", "sglang==0.5.9", expect=0)
    config = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    require("eagle_config" in config, "the drafter's config does not name the layers for the server")


def write_input(path: Path) -> Path:
    """Rows of random token ids, of which the second half counts: the tiny model has no tokenizer."""
    numbers = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(SAMPLES):
            tokens = numbers.randint(3, LONGEST)
            ids = [numbers.randrange(VOCABULARY) for _ in range(tokens)]
            mask = [int(2 * at >= tokens) for at in range(tokens)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path

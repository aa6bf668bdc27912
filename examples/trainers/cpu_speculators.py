"""Entry point for ``speculators`` 0.9 where there is no accelerator: its trainer asks torch for one.

    patchkit train … --trainer-entry cpu_speculators.py -- --draft-attn-impl eager \
        --loss-implementation eager --num-workers 0 --mask-token-id 0

With an accelerator this changes nothing.
"""

from __future__ import annotations

import sys

import torch
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig

if not torch.accelerator.is_available():

    class OnCpu(trainer.Trainer):
        """The trainer with the one device that there is, whatever it would set itself to."""

        @property
        def device_type(self) -> str:
            return "cpu"

        @device_type.setter
        def device_type(self, value: str) -> None:
            pass

    cli.Trainer = OnCpu
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda *_args, **_options: None

if __name__ == "__main__":
    cli.main(TrainConfig.resolve(sys.argv[1:]))

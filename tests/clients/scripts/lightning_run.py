"""A Lightning job with ModelCheckpoint(save_last=True) on a tiny model: saves every step, keeps two, resumes.

Says `started` with the step it resumed from and `saved` for every file that was written, with its SHA-256.
Between two steps passes the time that real training takes: `--pause-s`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from protocol import emit

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree


class Reporting(ModelCheckpoint):
    """Tells the test of every checkpoint that it wrote."""

    def _save_checkpoint(self, trainer: lightning.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        path = Path(filepath)
        emit(event="saved", path=path.name, files=digest_tree(path))


class Model(lightning.LightningModule):
    """One layer with an optimizer that has a state; takes its time for every step."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s
        self.layer = torch.nn.Linear(512, 256)

    def on_train_start(self) -> None:
        emit(event="started", step=self.trainer.global_step)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        time.sleep(self._pause_s)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    lightning.seed_everything(3)
    checkpoints = Reporting(
        dirpath=options.output,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="step",
        mode="max",
        save_last=True,
    )
    trainer = lightning.Trainer(
        max_steps=options.max_steps,
        accelerator="cpu",
        devices=1,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.utils.data.TensorDataset(torch.randn(64, 512))
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    trainer.fit(Model(options.pause_s), loader, ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()

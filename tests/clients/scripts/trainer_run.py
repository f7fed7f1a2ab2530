"""A Hugging Face Trainer job on a tiny model: trains, saves every step, rotates, resumes; or dies in a save.

Says `started` with the step it resumed from and `saved` for every checkpoint, with the SHA-256 of its files.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from pathlib import Path

import torch
from protocol import emit
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree

TOKENS = 16


class Samples(torch.utils.data.Dataset):
    """Random token sequences, the same in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self._tokens = torch.randint(0, 256, (64, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[number], "labels": self._tokens[number]}


class Reporter(TrainerCallback):
    """Tells the test what happened. `on_save` comes when the new checkpoint is whole, old ones are gone.

    With `waits` it then waits for a line on stdin."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits

    def on_train_begin(self, args, state, control, **_):
        emit(event="started", step=state.global_step)

    def on_save(self, args, state, control, **_):
        name = f"checkpoint-{state.global_step}"
        emit(event="saved", path=name, files=digest_tree(Path(args.output_dir, name)))
        if self._waits:
            sys.stdin.readline()


def die_while_saving(file_name: str, step: int) -> None:
    """From now on the process is killed when half of checkpoint-STEP/FILE_NAME has been written."""
    save = torch.save

    def half_save(value: object, path: object, *arguments: object, **options: object) -> None:
        if not str(path).endswith(f"checkpoint-{step}/{file_name}"):
            return save(value, path, *arguments, **options)
        whole = io.BytesIO()
        save(value, whole)
        with open(str(path), "wb") as file:
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half_save


def train(output: str, max_steps: int, resume: bool, waits: bool) -> None:
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model, callbacks = GPT2LMHeadModel(config), [Reporter(waits)]
    trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output")
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--die-in", metavar="FILE", help="be killed while this file of the last step is saved"
    )
    parser.add_argument("--wait", action="store_true", help="for a line on stdin after each save")
    options = parser.parse_args()
    if options.die_in:
        die_while_saving(options.die_in, options.max_steps)
    train(options.output, options.max_steps, options.resume, options.wait)


if __name__ == "__main__":
    main()

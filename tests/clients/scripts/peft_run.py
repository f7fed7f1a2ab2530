"""A PEFT job under accelerate: trains a LoRA adapter on a frozen model, saves every step, resumes.

Accelerator.save_state rotates `checkpoints/checkpoint_STEP` itself (the newest two stay); the adapter alone
is saved to `adapter/`, over the one before. Says `started` with the step it resumed from, and `saved` for
both.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from protocol import emit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))
from clients.recovery import digest_tree

KEEP, TOKENS = 2, 16
Weights = dict[str, torch.Tensor]


class Counter:
    """The step, as a part of what Accelerator saves."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def base_model() -> PreTrainedModel:
    """The frozen model, the same in every process."""
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=2))


def adapter_of(model: PeftModel) -> Weights:
    return {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}


def is_same(one: Weights, two: Weights) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def train_step(
    accelerator: Accelerator, model: PeftModel, optimizer: torch.optim.Optimizer, step: int
) -> None:
    tokens = torch.randint(0, 256, (4, TOKENS), generator=torch.Generator().manual_seed(step))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def save(accelerator: Accelerator, model: PeftModel, output: Path, step: int) -> None:
    accelerator.project_configuration.iteration = step
    accelerator.save_state()
    accelerator.unwrap_model(model).save_pretrained(output / "adapter")
    for path in (f"checkpoints/checkpoint_{step}", "adapter"):
        emit(event="saved", path=path, step=step, files=digest_tree(output / path))


def resume(accelerator: Accelerator, model: PeftModel, counter: Counter, output: Path) -> None:
    """Load the newest state; the adapter that was saved alone must be the same one."""
    accelerator.load_state()
    alone = PeftModel.from_pretrained(base_model(), output / "adapter")
    correct = is_same(adapter_of(alone), adapter_of(accelerator.unwrap_model(model)))
    emit(event="started", step=counter.step, correct=correct)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each save")
    options = parser.parse_args()
    project = ProjectConfiguration(str(options.output), automatic_checkpoint_naming=True, total_limit=KEEP)
    accelerator = Accelerator(cpu=True, project_config=project)
    counter = Counter()
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(base_model(), config)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(counter)
    if options.resume:
        resume(accelerator, model, counter, options.output)
    while counter.step < options.max_steps:
        counter.step += 1
        train_step(accelerator, model, optimizer, counter.step)
        save(accelerator, model, options.output, counter.step)
        time.sleep(options.pause_s)


if __name__ == "__main__":
    main()

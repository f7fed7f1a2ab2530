"""Real training whose saves the codecs are measured on: a small GPT, AdamW, LoRA, the HF Trainer.

    python tests/benchmarks/training.py FOLDER [--steps 300] [--gap 10] [--width 256] [--layers 6]

`--batch 4` is for a slow machine. One rule: everything is trained, nothing is drawn from a distribution; the
text is the source of Python's own library, which is wherever Python is. Leaves in FOLDER:

- `adamw/stepN.pt` ×6: weights, AdamW's moments and an average of the weights;
- `exports/stepN.fp32.safetensors` and `exports/stepN.bf16.safetensors` of the same steps;
- `lora/stepN.safetensors` ×4: the whole model, of which only the adapters learn;
- `trainer/checkpoint-N/` ×5: a full fine-tune by the HF Trainer;
- `finetuned/stepN.bf16.safetensors` ×5: its weights alone, as they are published.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY = 8192
CONTEXT = 128
ADAMW_SAVES, LORA_SAVES, TRAINER_SAVES = 6, 4, 5
_LORA_RANK = 8
_FINETUNE_BATCH = 2
_TEXT_BYTES = 12 << 20


def tokens() -> Tensor:
    """The text as numbers of its words, 0 for all but the most frequent."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        text += path.read_text(errors="replace")
        if len(text) > _TEXT_BYTES:
            break
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    frequent = Counter(words).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def batches(text: Tensor, seed: int, batch: int) -> Iterator[Tensor]:
    """Excerpts, `batch` × CONTEXT."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
        yield torch.stack([text[start : start + CONTEXT] for start in starts.tolist()])


def new_model(width: int, layers: int) -> GPT2LMHeadModel:
    """The model before it has learnt anything."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=width, n_layer=layers, n_head=max(width // 64, 1)
    )
    return GPT2LMHeadModel(config)


def learning_rate(step: int, steps: int) -> float:
    """The usual schedule: 20 steps up, then a cosine down to a tenth."""
    progress = max(0.0, (step - 20) / max(steps - 20, 1))
    return min(step / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(
    model: nn.Module, parameters: Iterable[nn.Parameter], source: Iterator[Tensor], steps: int, peak: float
) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """Train with AdamW; after each step its number and the optimizer."""
    optimizer = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = peak * learning_rate(step, steps)
        batch = next(source)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        yield step, optimizer


def own(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights without names that share another's storage (safetensors refuses them)."""
    return {name: weight.contiguous() for name, weight in weights.items() if name != "lm_head.weight"}


def pretrain(folder: Path, model: GPT2LMHeadModel, source: Iterator[Tensor], steps: int, gap: int) -> None:
    """`adamw/` and `exports/`, the last ADAMW_SAVES saves `gap` steps apart."""
    for name in ("adamw", "exports"):
        (folder / name).mkdir(parents=True)
    average = {name: weight.detach().clone() for name, weight in own(model.state_dict()).items()}
    first = steps - gap * (ADAMW_SAVES - 1)
    for step, optimizer in train(model, model.parameters(), source, steps, 6e-4):
        weights = own(model.state_dict())
        for name, weight in weights.items():
            average[name].lerp_(weight, 0.01)
        if step < first or (steps - step) % gap:
            continue
        whole = {"model": weights, "ema": average, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(whole, folder / "adamw" / f"step{step}.pt")
        save_file(weights, folder / "exports" / f"step{step}.fp32.safetensors")
        halved = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        save_file(halved, folder / "exports" / f"step{step}.bf16.safetensors")


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(inputs, _LORA_RANK) / math.sqrt(inputs))
        self.lora_B = nn.Parameter(torch.zeros(_LORA_RANK, outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        answer: Tensor = self.base(hidden) + 2 * (hidden @ self.lora_A @ self.lora_B)
        return answer


def adapt(folder: Path, model: GPT2LMHeadModel, source: Iterator[Tensor], steps: int, gap: int) -> None:
    """`lora/`: the frozen model with adapters at its attention, saved as a whole."""
    (folder / "lora").mkdir(parents=True)
    for weight in model.parameters():
        weight.requires_grad_(False)
    for block in model.transformer.h:
        attention = block.attn.c_attn
        block.attn.c_attn = Adapted(attention, *attention.weight.shape)
    adapters = [weight for weight in model.parameters() if weight.requires_grad]
    for step, _ in train(model, adapters, source, steps, 1e-3):
        if step > steps - gap * LORA_SAVES and (steps - step) % gap == 0:
            save_file(own(model.state_dict()), folder / "lora" / f"step{step}.safetensors")


def finetune(folder: Path, model: GPT2LMHeadModel, text: Tensor, gap: int) -> None:
    """`trainer/`: the last saves of a full fine-tune by the HF Trainer, at the rate usual for one."""
    source = batches(text, 3, _FINETUNE_BATCH)
    steps = 2 * gap * TRAINER_SAVES
    excerpts = [row for _ in range(steps) for row in next(source)]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=_FINETUNE_BATCH,
        learning_rate=2e-5,
        warmup_steps=5,
        save_steps=gap,
        save_total_limit=TRAINER_SAVES,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=4,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in excerpts],
    ).train()
    export_finetuned(folder)


def export_finetuned(folder: Path) -> None:
    """`finetuned/`: the Trainer's weights as bfloat16."""
    (folder / "finetuned").mkdir()
    for checkpoint in (folder / "trainer").iterdir():
        weights = load_file(checkpoint / "model.safetensors")
        step = checkpoint.name.rpartition("-")[2]
        halved = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        save_file(halved, folder / "finetuned" / f"step{step}.bf16.safetensors")


def make_series(folder: Path, steps: int, gap: int, width: int, layers: int, batch: int) -> None:
    """All series. Takes minutes; the same bytes on the same machine and releases."""
    text = tokens()
    model = new_model(width, layers)
    pretrain(folder, model, batches(text, 1, batch), steps, gap)
    trained = {name: weight.clone() for name, weight in model.state_dict().items()}
    finetune(folder, model, text, gap)
    model.load_state_dict(trained)
    adapt(folder, model, batches(text, 2, batch), max(gap * LORA_SAVES, 40), gap)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--gap", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        make_series(asked.folder, asked.steps, asked.gap, asked.width, asked.layers, asked.batch)


if __name__ == "__main__":
    main()

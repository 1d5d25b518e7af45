"""fp8parity in somebody else's training loop: plain PyTorch, torchao's own conversion, no runner of ours.

    python examples/plain_loop.py out/plain
    fp8parity judge out/plain
    fp8parity report out/plain

Trains a toy language model in BF16 and in rowwise FP8 on three seeds, on any CPU in seconds. The five lines that log
are marked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8parity.probe import GemmProbe
from fp8parity.run_log import start_run
from fp8parity_analysis.criteria import Criteria

CRITERIA = Criteria(margin=0.0025, eval_precision="arm")
"""This loop evaluates each arm with its own forward pass."""

VOCAB, WIDTH, CONTEXT, ROWS, STEPS = 64, 32, 16, 8, 40


class Toy(nn.Module):
    """An embedding of the last two tokens, two blocks of one linear each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.lm_head = nn.Linear(2 * WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [rows, context] to logits [rows, context, VOCAB]."""
        now = self.embed(tokens)
        x = torch.cat((now, now.roll(1, 1)), -1)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        out: Tensor = self.lm_head(x)
        return out


def batch(seed: int) -> Tensor:
    """Return rows of a sequence in which two tokens decide the next, int64 [ROWS, CONTEXT + 1]."""
    rows = torch.randint(0, VOCAB, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(seed))
    for i in range(2, CONTEXT + 1):
        rows[:, i] = (3 * rows[:, i - 1] + rows[:, i - 2]) % VOCAB
    return rows


def train(study: Path, arm: str, seed: int) -> None:
    """Train one run of the study."""
    torch.manual_seed(seed)
    model = Toy().bfloat16()
    if arm != "bf16":
        config = Float8LinearConfig.from_recipe_name(arm)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())

    log = start_run(study, arm=arm, seed=seed, settings={"lr": 1e-2, "steps": STEPS}, criteria=CRITERIA)  # 1
    probe = GemmProbe(model, what_if=["rowwise"] if arm == "bf16" else [])
    for step in range(1, STEPS + 1):
        rows = batch(1000 * seed + step)
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(step, step * ROWS * CONTEXT, loss.item())  # 2
        if step % 10 == 0:
            log.probe(probe.run(step, step * ROWS * CONTEXT, [rows], loss_of))  # 3
            with torch.no_grad():
                log.evaluate(step, loss_of(batch(-1)).item(), eval_precision="arm")  # 4
    log.finish(STEPS * ROWS * CONTEXT)  # 5


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for one_seed in (0, 1, 2):
        for one_arm in ("bf16", "rowwise"):
            train(out, one_arm, one_seed)
    print(f"trained 6 runs; now: fp8parity judge {out}")

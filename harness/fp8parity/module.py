"""The Lightning side of one run: model, precision, optimizer, loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fp8parity import layer_policy, own_model, precision
from fp8parity.data import BatchPlan, batch_digest
from fp8parity.errors import UsageError
from fp8parity.fork_state import StartState, load_moments, load_weights
from fp8parity.layer_policy import LayerPlan
from fp8parity.model import DecoderLM, initialise, next_token_loss, parameters_digest
from fp8parity.precision.bf16 import use_fp32_accumulation
from fp8parity.precision.record import ConversionRecord
from fp8parity.precision_rules import jitter_of
from fp8parity.probe_signals import blocks_of
from fp8parity.schedule import run_lr_factor
from fp8parity.shapes import linear_shapes
from fp8parity.spec import ModelSpec, RunSpec

MicroBatch = tuple[Tensor, str]
"""Rows int64 [micro_batch, context + 1] and the digest of the whole step's batch."""


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to train: converted, and with the evidence of what it was before."""

    model: nn.Module
    init_digest: str
    record: ConversionRecord
    plan: LayerPlan


def initialised(spec: RunSpec, vocab_rows: int, recipe_dir: Path, start: StartState | None) -> nn.Module:
    """Build the model with the weights that its seed, its files, or a fork's parent (`start`) say.

    `recipe_dir` is where the files of a model of the user's are.
    """
    model: nn.Module
    if isinstance(spec.model, ModelSpec):
        checkpointing = spec.train.activation_checkpointing
        model = DecoderLM(spec.model, vocab_rows, activation_checkpointing=checkpointing)
        if start is None:
            initialise(model, spec.seed)
    else:
        model = own_model.build(spec.model, spec.seed, recipe_dir)
        if spec.train.activation_checkpointing:
            own_model.enable_checkpointing(model)
    if start is not None:
        load_weights(model, start)
    return model


def build_model(
    spec: RunSpec, vocab_rows: int, start: StartState | None = None, recipe_dir: Path = Path()
) -> BuiltModel:
    """Build, initialise (a fork: as its parent was), digest, convert and compile the model of a run, in that order."""
    model = initialised(spec, vocab_rows, recipe_dir, start)
    init_digest = parameters_digest(model)
    plan = layer_policy.resolve(linear_shapes(spec.model, vocab_rows), spec.precision)
    record = precision.apply(model, plan, spec.precision, jitter=jitter_of(spec))
    if spec.train.bf16_gemm == "fp32_accumulate":
        use_fp32_accumulation(model)
    if spec.train.compile == "blocks":
        compile_blocks(model)
    return BuiltModel(model, init_digest, record, plan)


def compile_blocks(model: nn.Module) -> None:
    """Compile each decoder block, in the same way in both arms.

    All blocks share one code object, so each kind (FP8 or BF16, training or evaluation) is one more compilation of
    it; past its limit the compiler would go on uncompiled with a warning, so the limit is raised and made an error.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    precision.patch_code_generation()
    for block in blocks_of(model).values():
        block.compile()


class LMModule(L.LightningModule):
    """One run's training step; the numbers of the last step are left on the device for the recorder.

    `owner` is the hash of the run that its checkpoints belong to, where `spec` is only one phase of it; `start` is
    what a fork starts from.
    """

    def __init__(
        self,
        spec: RunSpec,
        vocab_rows: int,
        when_built: Callable[[], None] = lambda: None,
        *,
        owner: str = "",
        start: StartState | None = None,
        recipe_dir: Path = Path(),
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recipe_dir = recipe_dir
        self.vocab_rows = vocab_rows
        self.when_built = when_built
        self.owner = owner or spec.hash()
        self.start = start
        self.built: BuiltModel | None = None
        self.last_loss = torch.zeros(())
        self.last_grad_norm = torch.zeros(())

    @property
    def decoder(self) -> nn.Module:
        """The model, once `configure_model` has run."""
        assert self.built is not None
        return self.built.model

    def configure_model(self) -> None:
        """Build and convert the model; Lightning calls this before it moves anything to the device."""
        if self.built is None:
            self.built = build_model(self.spec, self.vocab_rows, self.start, self.recipe_dir)
            self.model = self.built.model
            self.when_built()

    def training_step(self, batch: MicroBatch, batch_idx: int) -> Tensor:
        """Return the micro-batch's mean loss in nats per token."""
        rows, _ = batch
        loss = next_token_loss(self.decoder(rows[:, :-1]), rows)
        self.last_loss = loss.detach()
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by global norm and keep the norm.

        Lightning 2.6.6 refuses its own clipping with fused AdamW under bf16-mixed, and would not return the norm.
        """
        limit = self.spec.optim.clip_norm
        self.last_grad_norm = torch.nn.utils.clip_grad_norm_(
            self.parameters(), float("inf") if limit is None else limit
        ).detach()

    def configure_optimizers(self) -> Any:
        """Return AdamW (no decay on norms) and the schedule, stepped once per optimizer step."""
        spec, optim = self.spec, self.spec.optim
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optim.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=optim.fused,
        )
        if self.start is not None:
            load_moments(optimizer, self.start)
            self.start = None  # the copy on the host has served
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: run_lr_factor(step, spec))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint whose parameters come in another order: the optimizer knows them by their place only.

        Raises:
            UsageError: the model's code registers its parameters in an order that changes from process to process.
        """
        for at, (saved, built) in enumerate(
            zip_longest(checkpoint["state_dict"], self.state_dict(), fillvalue="none")
        ):
            if saved != built:
                raise UsageError(
                    f"model: parameter {at} is {built} and was {saved} when the checkpoint was written; register "
                    "layers in a fixed order (not from a set), then delete the run's checkpoints folder"
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write into the checkpoint which run it belongs to."""
        checkpoint["fp8parity"] = {"spec_hash": self.owner}


class _MicroBatches(IterableDataset[MicroBatch]):
    """The micro-batches from `start_step` on, each step's batch cut in order.

    `pinned` rows are copied to a GPU while it works; a copy from ordinary memory would wait until it is idle.
    """

    def __init__(self, plan: BatchPlan, accumulate: int, start_step: int, *, pinned: bool) -> None:
        self.plan = plan
        self.accumulate = accumulate
        self.start_step = start_step
        self.pinned = pinned

    def __iter__(self) -> Iterator[MicroBatch]:
        step = self.start_step
        while True:
            rows = self.plan.rows(step)
            digest = batch_digest(rows)
            batch = torch.from_numpy(rows)
            for part in (batch.pin_memory() if self.pinned else batch).chunk(self.accumulate):
                yield part, digest
            step += 1


class TokenDataModule(L.LightningDataModule):
    """Feeds batches that are a pure function of (seed, step); its state is the step to continue from."""

    def __init__(self, plan: BatchPlan, accumulate: int) -> None:
        super().__init__()
        self.plan = plan
        self.accumulate = accumulate
        self.start_step = 0

    def train_dataloader(self) -> DataLoader[MicroBatch]:
        """Return the loader; in this process, since making a batch is an index into mapped memory."""
        pinned = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        batches = _MicroBatches(self.plan, self.accumulate, self.start_step, pinned=pinned)
        return DataLoader(batches, batch_size=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished optimizer steps."""
        assert self.trainer is not None
        return {"start_step": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the checkpoint's step; Lightning calls this before `train_dataloader`."""
        self.start_step = int(state_dict["start_step"])

"""The learner's arithmetic: forward/backward of training rows, and the optimizer step. No process, no message, no slot.

Master weights and gradients are two flat float32 buffers; the model's parameters are views of the one, their `.grad`
views of the other, so that clipping and AdamW are a few operators however many tensors the model has. Under another
compute dtype the parameters are views of a rounded copy, made again after each step: the same rounding as in the slots,
so that samplers and learner compute with equal weights, while updates too small for that dtype still add up.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shm.errors import HeadwayError
from workers.errors import NonFiniteError
from workers.learning.adam import Adam
from workers.learning.packed_attention import PackedAttention, packing_of
from workers.learning.packing import MicroBatch, TrainingRows, micro_batches
from workers.learning.stopwatch import Stopwatch
from workers.learning.training_metrics import token_metrics
from workers.model import RopeTable, Weights, bind_weights, decode, logits
from workers.model_config import ModelConfig, layout
from workers.policy_losses.loss_terms import kl_k3, token_entropies, token_logprobs
from workers.policy_losses.losses import build_loss
from workers.policy_losses.token_losses import TokenBatch


class TrainingError(HeadwayError, ValueError):
    """The learner was given options that do not fit together, or calls in the wrong order."""


class Trainee:
    """A model in training. Deterministic on the CPU: same weights, same calls, same bits (for one thread count).

    initial: the weights to begin with, float32 [num_elements], which become its own; it computes on their device.
    optimizer: {"beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}, all optional. Matrices alone decay,
    decoupled (AdamW); grad_clip_norm is the largest norm of the whole gradient, None for no clipping. loss: a record
    for `losses.build_loss`. kl_coefficient: of the KL divergence to `reference` [num_elements], which is kept (default:
    a copy of the initial weights); entropy_coefficient: of the entropy, which is rewarded; 0 is off, and both are
    normalised like the loss.
    temperature: the sampling temperature behind the behaviour log-probs. micro_batch_tokens: padded tokens that go
    through the model at once. dtype: what the model computes in; master weights, gradients and optimizer are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        initial: Tensor,
        *,
        reference: Tensor | None = None,
        optimizer: dict[str, Any],
        loss: dict[str, Any],
        kl_coefficient: float = 0.0,
        entropy_coefficient: float = 0.0,
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        dtype: torch.dtype = torch.float32,
    ):
        if not (np.isfinite(temperature) and temperature > 0):
            raise TrainingError(
                f"temperature is {temperature}; log-probs divide by it, so it must be finite and above 0."
            )
        if micro_batch_tokens < 1:
            raise TrainingError(f"micro_batch_tokens is {micro_batch_tokens}; a micro-batch holds at least 1 token.")
        self.config = config
        self.device = initial.device
        self.flat = initial  # what publishing copies
        self.flat_grad = torch.zeros_like(self.flat)
        self._gradients = bind_weights(self.flat_grad, config).named
        # What the model computes with: master weights and their gradient, or a rounded copy and its own.
        self._is_rounded = dtype != torch.float32
        self._compute = self.flat.to(dtype)  # the same tensor when no rounding is needed
        self._compute_grad = torch.zeros_like(self._compute) if self._is_rounded else self.flat_grad
        self.weights = bind_weights(self._compute, config)
        gradients = bind_weights(self._compute_grad, config)
        for name, parameter in self.weights.named.items():
            parameter.requires_grad_(True)
            parameter.grad = gradients.named[name]
        self._rope = RopeTable(config, self.device, dtype)
        self._loss = build_loss(loss)
        self._kl_coefficient, self._entropy_coefficient = kl_coefficient, entropy_coefficient
        # A term of the loss besides the advantage: tokens without advantage train, too.
        self._trains_all = kl_coefficient > 0 or entropy_coefficient > 0 or loss["name"] == "CustomLoss"
        self._reference = None
        if kl_coefficient > 0:
            flat = self._compute.detach().clone() if reference is None else reference.to(dtype)
            self._reference = bind_weights(flat, config)
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = self._make_optimizer(optimizer)
        self.has_gradients = False  # whether gradients are there for the next step

    def _make_optimizer(self, options: dict[str, Any]) -> Adam:
        known = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": None}
        if unknown := sorted(set(options) - set(known)):
            raise TrainingError(f"The optimizer has the unknown options {unknown}; it takes {sorted(known)}.")
        values = known | options
        self._grad_clip_norm: float | None = values["grad_clip_norm"]
        if self._grad_clip_norm is not None and not self._grad_clip_norm > 0:
            raise TrainingError(
                f"grad_clip_norm is {self._grad_clip_norm}; use a number above 0, or None for no clipping."
            )
        own = {name: values[name] for name in ("beta1", "beta2", "eps", "weight_decay")}
        return Adam(self.flat, self.flat_grad, num_decayed=layout(self.config).num_matrix_elements, **own)

    def forward_backward(
        self,
        rows: TrainingRows,
        version: int,
        zero_gradients: bool,
        batch: int | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Add the gradient of the rows' loss to `flat_grad` (from zero if `zero_gradients`), and measure them.

        version: the learner's; it tells which tokens are of age 0. batch only names the batch in errors. beat
        is called before each micro-batch, and in each layer both ways: a sign of life. Raises RowsError for rows that
        break their rules, and NonFiniteError for a loss that is not finite: the gradients are then void, the parameters
        and the optimizer as before.
        """
        rows.check(self.config.num_ids, self.config.max_positions)
        if zero_gradients or not self.has_gradients:
            self.flat_grad.zero_()
            if self._is_rounded:
                self._compute_grad.zero_()  # what a call that raised may have left
        forward, backward = Stopwatch(self.device), Stopwatch(self.device)
        num_tokens, sources, results = 0, [], []
        for micro_batch in micro_batches(rows, self._micro_batch_tokens, by_scale=self._trains_all):
            beat()
            num_tokens += micro_batch.num_read
            sources.append(micro_batch.sources)
            with torch.set_grad_enabled(micro_batch.needs_gradient):
                with forward:
                    losses, result = self._forward(micro_batch, rows, version, beat)
                if micro_batch.needs_gradient:
                    with backward:
                        losses.sum().backward()
                        self._collect_gradient()
            results.append(result)
        order = np.concatenate(sources) if sources else np.zeros(0, dtype=np.int64)
        # One transfer for the whole call, so that a GPU never stops between micro-batches.
        names = list(results[0]) if results else ["loss", "logprob"]
        columns = [torch.stack(tuple(result.values())) for result in results]
        values = torch.cat(columns, dim=1).cpu().numpy() if columns else np.zeros((len(names), 0), dtype=np.float32)
        measured = dict(zip(names, values.astype(np.float64), strict=True))
        self._check_loss(rows, order, measured["loss"], measured["logprob"], batch)
        self.has_gradients = True
        return {
            "train/loss": float(measured["loss"].sum()),
            "train/tokens": float(num_tokens),
            "train/forward_seconds": forward.seconds(),
            "train/backward_seconds": backward.seconds(),
            **token_metrics(measured, rows, order, version),
        }

    def _forward(
        self, micro_batch: MicroBatch, rows: TrainingRows, version: int, beat: Callable[[], None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Token losses [M] with gradient, and detached float32 columns [M] (see `token_metrics`)."""

        def move(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        attend = PackedAttention(packing_of(micro_batch, self.device), self.config.layer_windows, beat)
        tokens, positions = move(micro_batch.tokens), move(micro_batch.positions)
        predict_index, targets = move(micro_batch.predict_index), move(micro_batch.targets)

        def predict(weights: Weights) -> Tensor:
            hidden = decode(weights, self.config, self._rope, tokens, positions, attend)
            # The head is the widest matrix: only the predictions that are trained or measured go through it.
            return logits(weights, hidden.index_select(0, predict_index))

        scores = predict(self.weights)
        logprobs = token_logprobs(scores, targets, self._temperature)
        sources = micro_batch.sources
        scales = move(rows.scales[sources])
        found = self._loss(
            TokenBatch(
                logprobs_M=logprobs,
                behaviour_logprobs_M=move(rows.behaviour_logprobs[sources]),
                weights_M=move(rows.weights[sources]),
                scales_M=scales,
                ages_M=move(version - rows.versions[sources].astype(np.int64)),
                rows_M=move(micro_batch.rows),
                num_rows=micro_batch.shape[0],
            )
        )
        losses = found.losses_M
        columns = {
            "ratio": found.ratios_M,
            "clipped": found.clipped_M,
            "capped_ratio": found.capped_ratios_M,
        }
        if self._reference is not None:
            with torch.no_grad():
                reference_logprobs = token_logprobs(predict(self._reference), targets, self._temperature)
            columns["kl"] = kl_k3(logprobs, reference_logprobs)
            losses = losses + self._kl_coefficient * scales * columns["kl"]
        if self._entropy_coefficient > 0:
            columns["entropy"] = token_entropies(scores, self._temperature)
            losses = losses - self._entropy_coefficient * scales * columns["entropy"]
        columns |= {"loss": losses, "logprob": logprobs}
        return losses, {name: column.detach().float() for name, column in columns.items() if column is not None}

    def _collect_gradient(self) -> None:
        """Add a rounded copy's gradient to the float32 one, micro-batch by micro-batch."""
        if self._is_rounded:
            self.flat_grad += self._compute_grad
            self._compute_grad.zero_()

    def round_weights(self) -> None:
        """Compute with `flat` as it is now: due after each change of it, and done after each step."""
        if self._is_rounded:
            with torch.no_grad():
                self._compute.copy_(self.flat)

    @property
    def optimizer_state(self) -> dict[str, Tensor]:
        """By name, not copied."""
        return self._optimizer.state()

    def optimizer_step(self, lr: float, gradient_scale: float = 1.0, batch: int | None = None) -> dict[str, float]:
        """Scale the gradient, clip it, step. `train/grad_norm` is the norm after scaling and before clipping.

        Raises NonFiniteError when that norm is not finite, before any parameter or optimizer state changes. The
        gradients are used up, either way.
        """
        if not self.has_gradients:
            raise TrainingError("There is no gradient to step with; call forward_backward before each optimizer_step.")
        if not (np.isfinite(lr) and lr >= 0):
            raise TrainingError(f"The learning rate is {lr}; it must be finite and at least 0.")
        self.has_gradients = False
        stopwatch = Stopwatch(self.device)
        with stopwatch:
            norm = float(torch.linalg.vector_norm(self.flat_grad)) * gradient_scale
            self._check_norm(norm, gradient_scale, batch)
            scale = gradient_scale
            if self._grad_clip_norm is not None and norm > self._grad_clip_norm:
                scale *= self._grad_clip_norm / norm
            if scale != 1.0:
                self.flat_grad.mul_(scale)
            self._optimizer.step(lr)
            self.round_weights()
        return {"train/grad_norm": norm, "train/lr": lr, "train/optimizer_seconds": stopwatch.seconds()}

    def _check_loss(
        self, rows: TrainingRows, order: np.ndarray, losses: np.ndarray, logprobs: np.ndarray, batch: int | None
    ) -> None:
        broken = ~(np.isfinite(losses) & np.isfinite(logprobs))
        if not broken.any():
            return
        self.has_gradients = False
        first = int(np.argmax(broken))
        raise NonFiniteError(
            f"The loss{_of(batch)} is {losses[first]} at {rows.place(int(order[first]))} (log-prob {logprobs[first]}, "
            f"{int(broken.sum())} of {len(broken)} tokens broken); a loss must be finite, so no parameter was changed. "
            "Lower the learning rate, or look at that row."
        )

    def _check_norm(self, norm: float, gradient_scale: float, batch: int | None) -> None:
        if np.isfinite(norm):
            return
        broken = [name for name, gradient in self._gradients.items() if not bool(gradient.isfinite().all())]
        where = f"first in {broken[0]!r}" if broken else f"each gradient is finite, gradient_scale is {gradient_scale}"
        raise NonFiniteError(
            f"The gradient norm{_of(batch)} is {norm} ({where}); it must be finite, so no parameter was changed. "
            "Lower the learning rate or set grad_clip_norm, or look at the batch's rows."
        )


def _of(batch: int | None) -> str:
    return "" if batch is None else f" of batch {batch}"

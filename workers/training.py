"""The learner's arithmetic: forward/backward of training rows, and the optimizer step. No process, no message, no slot.

Master weights and gradients are two flat float32 buffers; the model's parameters are views of the one, their `.grad`
views of the other, so that clipping and AdamW are a few operators however many tensors the model has.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shm.errors import HeadwayError
from workers.errors import NonFiniteError
from workers.losses import build_loss, token_logprobs
from workers.model import RopeTable, bind_weights, decode, init_flat, logits
from workers.model_config import ModelConfig, layout
from workers.packed_attention import PackedAttention
from workers.packing import MicroBatch, TrainingRows, micro_batches
from workers.stopwatch import Stopwatch


class TrainingError(HeadwayError, ValueError):
    """The learner was given options that do not fit together, or calls in the wrong order."""


class Trainee:
    """A model in training. Deterministic on the CPU: same seed, same calls, same bits (for one thread count).

    optimizer: {"beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}, all optional. Matrices alone decay,
    decoupled (AdamW); grad_clip_norm is the largest norm of the whole gradient, None for no clipping. loss: a record
    for `losses.build_loss`. temperature: the sampling temperature behind the behaviour log-probs. micro_batch_tokens:
    padded tokens that go through the model at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int,
        optimizer: dict[str, Any],
        loss: dict[str, Any],
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        device: torch.device | str = "cpu",
    ):
        if not (np.isfinite(temperature) and temperature > 0):
            raise TrainingError(
                f"temperature is {temperature}; log-probs divide by it, so it must be finite and above 0."
            )
        if micro_batch_tokens < 1:
            raise TrainingError(f"micro_batch_tokens is {micro_batch_tokens}; a micro-batch holds at least 1 token.")
        self.config = config
        self.device = torch.device(device)
        self.flat = init_flat(config, seed).to(self.device)  # float32 [num_elements]: what publishing copies
        self.flat_grad = torch.zeros_like(self.flat)
        self.weights = bind_weights(self.flat, config)
        gradients = bind_weights(self.flat_grad, config)
        for name, parameter in self.weights.named.items():
            parameter.requires_grad_(True)
            parameter.grad = gradients.named[name]
        self._gradients = gradients.named
        self._rope = RopeTable(config, self.device)
        self._loss = build_loss(loss)
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = self._make_optimizer(optimizer)
        self._has_gradients = False

    def _make_optimizer(self, options: dict[str, Any]) -> torch.optim.AdamW:
        known = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": None}
        if unknown := sorted(set(options) - set(known)):
            raise TrainingError(f"The optimizer has the unknown options {unknown}; it takes {sorted(known)}.")
        values = known | options
        self._grad_clip_norm: float | None = values["grad_clip_norm"]
        if self._grad_clip_norm is not None and not self._grad_clip_norm > 0:
            raise TrainingError(
                f"grad_clip_norm is {self._grad_clip_norm}; use a number above 0, or None for no clipping."
            )
        boundary = layout(self.config).num_matrix_elements
        groups = []
        for part, decay in ((slice(0, boundary), values["weight_decay"]), (slice(boundary, None), 0.0)):
            parameters = self.flat[part]
            parameters.grad = self.flat_grad[part]
            groups.append({"params": [parameters], "weight_decay": decay})
        return torch.optim.AdamW(
            groups, lr=0.0, betas=(values["beta1"], values["beta2"]), eps=values["eps"], fused=True
        )

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
        is called before each micro-batch: a sign of life. Raises RowsError for rows that break their rules, and
        NonFiniteError for a loss that is not finite: the gradients are then void, the parameters and the optimizer as
        before.
        """
        rows.check(self.config.vocab_size, self.config.max_positions)
        if zero_gradients or not self._has_gradients:
            self.flat_grad.zero_()
        forward, backward = Stopwatch(self.device), Stopwatch(self.device)
        num_tokens, sources, results = 0, [], []
        for micro_batch in micro_batches(rows, self._micro_batch_tokens):
            beat()
            num_tokens += len(micro_batch.tokens)
            sources.append(micro_batch.sources)
            with torch.set_grad_enabled(micro_batch.needs_gradient):
                with forward:
                    losses, result = self._forward(micro_batch, rows)
                if micro_batch.needs_gradient:
                    with backward:
                        losses.sum().backward()
            results.append(result)
        order = np.concatenate(sources) if sources else np.zeros(0, dtype=np.int64)
        # One transfer for the whole call, so that a GPU never stops between micro-batches.
        measured = torch.cat(results, dim=1).cpu().numpy() if results else np.zeros((3, 0), dtype=np.float32)
        losses, logprobs, clipped = measured.astype(np.float64)
        self._check_loss(rows, order, losses, logprobs, batch)
        self._has_gradients = True
        return {
            "train/loss": float(losses.sum()),
            "train/tokens": float(num_tokens),
            "train/forward_seconds": forward.seconds(),
            "train/backward_seconds": backward.seconds(),
            **_importance_metrics(logprobs, rows.behaviour_logprobs[order], rows.versions[order], clipped, version),
        }

    def _forward(self, micro_batch: MicroBatch, rows: TrainingRows) -> tuple[Tensor, Tensor]:
        """Token losses [M] with gradient, and detached float32 rows [3, M]: loss, log-prob, clipped."""

        def move(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        attend = PackedAttention(micro_batch.shape, move(micro_batch.pad_index), move(micro_batch.pack_index))
        hidden = decode(
            self.weights, self.config, self._rope, move(micro_batch.tokens), move(micro_batch.positions), attend
        )
        # The head is the widest matrix: only the predictions that are trained or measured go through it.
        predicting = hidden.index_select(0, move(micro_batch.predict_index))
        logprobs = token_logprobs(logits(self.weights, predicting), move(micro_batch.targets), self._temperature)
        behaviour = move(rows.behaviour_logprobs[micro_batch.sources])
        token_losses = self._loss(logprobs, behaviour, move(rows.weights[micro_batch.sources]))
        detached = torch.stack((token_losses.losses_M.detach(), logprobs.detach(), token_losses.clipped_M.float()))
        return token_losses.losses_M, detached

    def optimizer_step(self, lr: float, gradient_scale: float = 1.0, batch: int | None = None) -> dict[str, float]:
        """Scale the gradient, clip it, step. `train/grad_norm` is the norm after scaling and before clipping.

        Raises NonFiniteError when that norm is not finite, before any parameter or optimizer state changes. The
        gradients are used up, either way.
        """
        if not self._has_gradients:
            raise TrainingError("There is no gradient to step with; call forward_backward before each optimizer_step.")
        if not (np.isfinite(lr) and lr >= 0):
            raise TrainingError(f"The learning rate is {lr}; it must be finite and at least 0.")
        self._has_gradients = False
        stopwatch = Stopwatch(self.device)
        with stopwatch:
            norm = float(torch.linalg.vector_norm(self.flat_grad)) * gradient_scale
            self._check_norm(norm, gradient_scale, batch)
            scale = gradient_scale
            if self._grad_clip_norm is not None and norm > self._grad_clip_norm:
                scale *= self._grad_clip_norm / norm
            if scale != 1.0:
                self.flat_grad.mul_(scale)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return {"train/grad_norm": norm, "train/lr": lr, "train/optimizer_seconds": stopwatch.seconds()}

    def _check_loss(
        self, rows: TrainingRows, order: np.ndarray, losses: np.ndarray, logprobs: np.ndarray, batch: int | None
    ) -> None:
        broken = ~(np.isfinite(losses) & np.isfinite(logprobs))
        if not broken.any():
            return
        self._has_gradients = False
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


def _importance_metrics(
    logprobs: np.ndarray, behaviour: np.ndarray, versions: np.ndarray, clipped: np.ndarray, version: int
) -> dict[str, float]:
    """Ratios over all generated tokens; sampler against learner over those of age 0. Absent where no token counts.

    mismatch/kl estimates KL(sampler || learner) by the mean of rho - 1 - log rho (Schulman's k3: never negative).
    """
    metrics: dict[str, float] = {}
    differences = logprobs - behaviour
    with np.errstate(over="ignore"):  # a ratio may be infinite: the loss caps it, and the metric should show it
        ratios = np.exp(differences)
    if len(ratios):
        metrics["importance/ratio_mean"] = float(ratios.mean())
        metrics["importance/ratio_max"] = float(ratios.max())
        metrics["importance/clip_frac"] = float(clipped.mean())
    current = versions == version
    if current.any():
        metrics["mismatch/kl"] = float((ratios - 1.0 - differences)[current].mean())
        metrics["mismatch/max_abs_logprob"] = float(np.abs(differences[current]).max())
    return metrics

"""What passes through the model cost in memory, per token, and how many tokens therefore go through it at once. Pure.

Counted is what `workers/model.py`, the loss and `workers/generation/sampling.py` keep at their peak, in elements; a run
of the learner on the CPU was measured against it (docs/decisions/processes.md).
"""

from dataclasses import dataclass

from shm.layout import ELEMENT_BYTES
from workers.model_config import ModelConfig

MAX_MICRO_BATCH_TOKENS = 8192  # padded tokens that go through the learner at once; more gain nothing
MAX_SAMPLER_BATCH_TOKENS = 4096  # tokens of one forward pass of a sampler; longer prefills go in chunks
CPU_BUDGET_BYTES = 2 << 30  # for the activations of a process on the CPU
CUDA_BUDGET_SHARE = 0.1  # the same on a GPU, of its memory
_F32 = 4


@dataclass(frozen=True, slots=True)
class PassCost:
    """Bytes of one pass: `token_bytes` for each token through the layers, `prediction_bytes` for each one through the
    head.
    """

    token_bytes: int
    prediction_bytes: int

    def num_bytes(self, tokens: int, predictions: int) -> int:
        return tokens * self.token_bytes + predictions * self.prediction_bytes


def learner_cost(
    model: ModelConfig, dtype: str, *, temperature: float, has_reference: bool, has_entropy: bool
) -> PassCost:
    """Forward and backward: every layer keeps what its gradient needs."""
    element = ELEMENT_BYTES[dtype]
    hidden, mlp = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # Two residuals and two norms; queries, keys, values and what attention gives, twice; gate, up, their product twice.
    layer = element * (4 * hidden + 3 * queries + 2 * keys + 4 * mlp)
    if element < _F32:
        layer += _F32 * 4 * hidden  # norms compute in float32
    # Logits and their log-probs, or later their gradient; a rounded model has them in its own dtype, too.
    copies = 2 + (temperature != 1.0) + has_reference + 4 * has_entropy + (element < _F32)
    # While one layer's gradient is computed it needs about two layers' more.
    return PassCost((model.num_layers + 2) * layer, model.num_ids * _F32 * copies)


def sampler_cost(model: ModelConfig, dtype: str, *, temperature: float, narrows: bool) -> PassCost:
    """A forward pass, of which one layer at a time is there. narrows: top_p or top_k."""
    element = ELEMENT_BYTES[dtype]
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = element * (4 * model.hidden_size + 3 * attention + 4 * model.intermediate_size)
    # Logits, probabilities, and their running sum in float64; narrowing sorts them with their ids.
    copies = 4 + (temperature != 1.0) + 6 * narrows + (element < _F32)
    return PassCost(layer, model.num_ids * _F32 * copies)


def micro_batch_tokens(cost: PassCost, budget_bytes: int) -> int:
    """Padded tokens of a micro-batch, each of which may be a prediction. At least 1: a longer row goes alone anyway."""
    return max(1, min(MAX_MICRO_BATCH_TOKENS, budget_bytes // cost.num_bytes(1, 1)))


def sampler_batch_tokens(cost: PassCost, budget_bytes: int, most_sequences: int) -> int:
    """Tokens of a sampler's pass, of which at most one of each sequence is a prediction."""
    all_predict = budget_bytes // cost.num_bytes(1, 1)
    if all_predict > most_sequences:  # there is room for prefill beside the predictions of all
        all_predict = (budget_bytes - most_sequences * cost.prediction_bytes) // cost.token_bytes
    return max(1, min(MAX_SAMPLER_BATCH_TOKENS, all_predict))

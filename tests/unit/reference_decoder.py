"""A slow decoder in float64, one sequence and one head at a time, that shares no code with `workers/model.py`."""

import math

import torch


def normalise(x, gain, eps):
    return gain * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def turn(x, theta):
    """RoPE on [T, h]: feature i of the first half and feature i of the second are one point of the plane."""
    length, size = x.shape
    half = size // 2
    columns = [None] * size
    for i in range(half):
        angle = torch.tensor([t * theta ** (-2 * i / size) for t in range(length)], dtype=torch.float64)
        first, second = x[:, i], x[:, half + i]
        columns[i] = first * torch.cos(angle) - second * torch.sin(angle)
        columns[half + i] = second * torch.cos(angle) + first * torch.sin(angle)
    return torch.stack(columns, dim=1)


def attention(q, k, v):
    """One head: q, k, v [T, h] -> [T, h]."""
    rows = []
    for t in range(len(q)):
        scores = (k[: t + 1] @ q[t]) / math.sqrt(q.shape[1])
        shares = torch.exp(scores - scores.max().detach())
        rows.append((shares / shares.sum()) @ v[: t + 1])
    return torch.stack(rows)


def reference_logits(named, config, tokens):
    """`named`: float64 tensors by layout name; tokens: a list of ids of one sequence. Returns logits [T, V]."""
    size, eps = config.head_dim, config.rms_norm_eps
    queries = config.num_heads * size
    keys = config.num_kv_heads * size
    per_key = config.num_heads // config.num_kv_heads
    hidden = torch.stack([named["embed"][token] for token in tokens])
    for layer in range(config.num_layers):

        def own(name, layer=layer):
            return named.get(f"layers.{layer}.{name}", torch.zeros((), dtype=torch.float64))

        x = normalise(hidden, own("attention_norm"), eps)
        qkv = x @ own("qkv").T + own("qkv_bias")
        heads = []
        for head in range(config.num_heads):
            kv = head // per_key
            q = qkv[:, head * size : (head + 1) * size]
            k = qkv[:, queries + kv * size : queries + (kv + 1) * size]
            v = qkv[:, queries + keys + kv * size : queries + keys + (kv + 1) * size]
            if config.qk_norm:
                q, k = normalise(q, own("q_norm"), eps), normalise(k, own("k_norm"), eps)
            heads.append(attention(turn(q, config.rope_theta), turn(k, config.rope_theta), v))
        hidden = hidden + torch.cat(heads, dim=1) @ own("out").T + own("out_bias")
        x = normalise(hidden, own("mlp_norm"), eps)
        both = x @ own("gate_up").T + own("gate_up_bias")
        gate, up = both[:, : config.intermediate_size], both[:, config.intermediate_size :]
        hidden = hidden + (gate / (1 + torch.exp(-gate)) * up) @ own("down").T + own("down_bias")
    x = normalise(hidden, named["final_norm"], eps)
    return x @ named["embed" if config.tie_embeddings else "head"].T

"""A slow decoder in float64, one sequence and one head at a time, that shares no code with `workers/model.py`."""

import math

import torch


def normalise(x, gain, eps):
    return gain * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def turn(x, theta):
    """RoPE on [T, h]: feature i of the first half and feature i of the second are one point of the plane."""
    length, size = x.shape
    speeds = torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds)
    first, second = x.chunk(2, dim=1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], 1)


def attention(q, k, v, window=0):
    """One head: q, k, v [T, h] -> [T, h]; with a window a token sees that many, itself included."""
    distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    seen = (distance >= 0) & (distance < (window or len(q)))
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~seen, -math.inf)
    shares = torch.exp(scores - scores.amax(dim=1, keepdim=True).detach())
    return shares / shares.sum(dim=1, keepdim=True) @ v


def reference_logits(named, config, tokens):
    """`named`: float64 tensors by layout name; tokens: a list of ids of one sequence. Returns logits [T, V].

    A list of such dicts instead, one per token: each token is computed by its own weights, over the keys and values of
    those before it as theirs made them.
    """
    by_token = named if isinstance(named, list) else [named] * len(tokens)
    distinct = list({id(weights): weights for weights in by_token}.values())
    size, eps = config.head_dim, config.rms_norm_eps
    queries = config.num_heads * size
    keys = config.num_kv_heads * size
    per_key = config.num_heads // config.num_kv_heads

    def rows(compute, layer=None):
        """compute(tensors of one version) -> [T, n]: of each token the row by its own weights."""
        prefix = "" if layer is None else f"layers.{layer}."

        def own(weights):
            return lambda tensor: weights.get(prefix + tensor, torch.zeros((), dtype=torch.float64))

        results = [compute(own(weights)) for weights in distinct]
        if len(distinct) == 1:
            return results[0]
        order = [next(i for i, weights in enumerate(distinct) if weights is mine) for mine in by_token]
        return torch.stack([results[order[t]][t] for t in range(len(tokens))])

    hidden = rows(lambda own: torch.stack([own("embed")[token] for token in tokens]))
    for layer in range(config.num_layers):
        x = hidden
        qkv = rows(lambda own, x=x: normalise(x, own("attention_norm"), eps) @ own("qkv").T + own("qkv_bias"), layer)
        heads = []
        for head in range(config.num_heads):
            kv = head // per_key
            q = qkv[:, head * size : (head + 1) * size]
            k = qkv[:, queries + kv * size : queries + (kv + 1) * size]
            v = qkv[:, queries + keys + kv * size : queries + keys + (kv + 1) * size]
            if config.qk_norm:
                q = rows(lambda own, q=q: normalise(q, own("q_norm"), eps), layer)
                k = rows(lambda own, k=k: normalise(k, own("k_norm"), eps), layer)
            if layer not in config.nope_layers:
                q, k = turn(q, config.rope_theta), turn(k, config.rope_theta)
            heads.append(attention(q, k, v, config.layer_windows[layer] if config.layer_windows else 0))
        out = torch.cat(heads, dim=1)
        hidden = hidden + rows(lambda own, out=out: out @ own("out").T + own("out_bias"), layer)
        x = hidden
        both = rows(lambda own, x=x: normalise(x, own("mlp_norm"), eps) @ own("gate_up").T + own("gate_up_bias"), layer)
        gate, up = both[:, : config.intermediate_size], both[:, config.intermediate_size :]
        inner = gate / (1 + torch.exp(-gate)) * up
        hidden = hidden + rows(lambda own, inner=inner: inner @ own("down").T + own("down_bias"), layer)
    head = "embed" if config.tie_embeddings else "head"
    scores = rows(lambda own: normalise(hidden, own("final_norm"), eps) @ own(head).T)
    lost = torch.full((len(tokens),), -math.inf, dtype=torch.float64)
    end = config.vocab_size if config.num_token_ids is None else config.num_token_ids
    return torch.stack([lost if token in config.unused_ids else scores[:, token] for token in range(end)], dim=1)

"""Synchronous training in one process, written the plain way: what `max_staleness=0` must equal.

A loop anyone could write from the formulas: sample each token with a full forward, play the game, centre the rewards,
one weighted sum as the loss, AdamW. It shares with Headway the first weights, the noise (a function of seed, group,
member, position) and the words of the task; everything else is its own.
"""

import math

import numpy as np
import torch

from pipeline.chat.format import ModelTurn
from pipeline.tasks import guess
from workers.generation.sampling import uniforms
from workers.model import init_flat
from workers.model_config import layout


def unpack(flat, config):
    """Views of the flat weights by name."""
    return {e.name: flat[e.offset : e.offset + math.prod(e.shape)].view(e.shape) for e in layout(config).entries}


def norm(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def rope(x, theta):
    """x [B, T, heads, size], rotated by position, half against half."""
    length, size = x.shape[1], x.shape[3]
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies[None, :]
    cos, sin = angles.cos().to(x.dtype)[None, :, None, :], angles.sin().to(x.dtype)[None, :, None, :]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def forward(weights, config, tokens):
    """tokens [B, T], padded on the right -> logits [B, T, V]."""
    batch, length = tokens.shape
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    hidden = weights["embed"][tokens]
    mask = torch.full((length, length), float("-inf"), dtype=hidden.dtype).triu(1)
    for layer in range(config.num_layers):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        qkv = norm(hidden, own["attention_norm"], config.rms_norm_eps) @ own["qkv"].T
        q, k, v = qkv.view(batch, length, heads + 2 * kv_heads, size).split([heads, kv_heads, kv_heads], dim=2)
        q, k = rope(q, config.rope_theta), rope(k, config.rope_theta)
        k, v = k.repeat_interleave(heads // kv_heads, 2), v.repeat_interleave(heads // kv_heads, 2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(size) + mask
        mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(batch, length, heads * size)
        hidden = hidden + mixed @ own["out"].T
        gate, up = (norm(hidden, own["mlp_norm"], config.rms_norm_eps) @ own["gate_up"].T).chunk(2, -1)
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ own["down"].T
    return norm(hidden, weights["final_norm"], config.rms_norm_eps) @ weights["embed"].T


def pad(sequences):
    longest = max(len(s) for s in sequences)
    return torch.tensor([s + [0] * (longest - len(s)) for s in sequences])


class Game:
    """One trajectory: ids, which of them were generated, their log-probs, and the game's state."""

    def __init__(self, group, member, row, chat):
        self.group, self.member, self.secret = group, member, row["number"]
        self.ids = chat.render_prompt([{"role": "user", "content": guess.PROMPT}], [])
        self.generated = [False] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.turn, self.turns, self.done, self.reward = [], 0, False, 0.0

    def add(self, token, logprob, chat):
        self.ids.append(token)
        self.generated.append(True)
        self.logprobs.append(logprob)
        self.turn.append(token)
        if token not in chat.stop_ids and len(self.turn) < guess.MAX_TURN_TOKENS:
            return
        self.turns += 1
        (call,) = chat.parse_turn(self.turn).tool_calls
        number = call["arguments"].get("number")
        if number == self.secret:
            self.reward, self.done = 1.0, True
        elif self.turns == guess.NUM_GUESSES:
            self.done = True
        else:
            answer = "higher" if number is not None and self.secret > number else "lower"
            content = f"error: {guess.UNREADABLE}" if number is None else answer
            turn = ModelTurn(self.turn, "", [])
            framing = chat.render_reply([], turn, [{"role": "tool", "content": content}], []).tokens
            self.ids += framing
            self.generated += [False] * len(framing)
            self.logprobs += [0.0] * len(framing)
            self.turn = []


@torch.no_grad()
def play(weights, config, games, seed, chat):
    """Sample all games to their ends, each token by a full forward of its whole context."""
    while running := [game for game in games if not game.done]:
        logits = forward(weights, config, pad([game.ids for game in running]))
        last = torch.tensor([len(game.ids) - 1 for game in running])
        logprobs = logits[torch.arange(len(running)), last].double().log_softmax(-1)
        noise = uniforms(
            seed,
            np.array([game.group for game in running]),
            np.array([game.member for game in running]),
            np.array([sum(game.generated) for game in running]),
        )
        cumulative = logprobs.exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, torch.from_numpy(noise)[:, None] * cumulative[:, -1:], right=True)
        for index, game in enumerate(running):
            token = int(tokens[index])
            game.add(token, float(logprobs[index, token]), chat)


def loss_of(weights, config, games, group_size, eps_max=6.0):
    """CISPO with group-centred, standardised advantages, averaged over the batch's generated tokens; scalar."""
    logits = forward(weights, config, pad([game.ids for game in games]))
    rows, places, tokens, advantages, behaviour = [], [], [], [], []
    for index, game in enumerate(games):
        members = games[index - index % group_size :][:group_size]
        mean = sum(one.reward for one in members) / group_size
        deviation = math.sqrt(sum((one.reward - mean) ** 2 for one in members) / group_size)
        advantage = (game.reward - mean) / max(deviation, 1e-8)
        for t in range(1, len(game.ids)):
            if game.generated[t]:
                rows.append(index)
                places.append(t - 1)  # where token t is predicted
                tokens.append(game.ids[t])
                advantages.append(advantage)
                behaviour.append(game.logprobs[t])
    logprobs = logits[rows, places].log_softmax(-1)[range(len(tokens)), tokens]
    ratios = (logprobs.detach() - torch.tensor(behaviour, dtype=logprobs.dtype)).exp().clamp(max=eps_max)
    return -(torch.tensor(advantages, dtype=logprobs.dtype) / len(tokens) * ratios * logprobs).sum()


def train(config, chat, rows, *, seed, steps, groups_per_step, group_size, lr, beta1, beta2, eps, grad_clip_norm):
    """Yields (games, loss, flat weights after the update) per step; learning rates `lr[step]`."""
    flat = init_flat(config, seed).double().requires_grad_(True)
    mean, square = torch.zeros_like(flat), torch.zeros_like(flat)
    for step in range(steps):
        weights = unpack(flat, config)
        games = [
            Game(group, member, rows[group % len(rows)], chat)
            for group in range(step * groups_per_step, (step + 1) * groups_per_step)
            for member in range(group_size)
        ]
        play({name: w.detach() for name, w in weights.items()}, config, games, seed, chat)
        loss = loss_of(weights, config, games, group_size)
        (gradient,) = torch.autograd.grad(loss, flat)
        if grad_clip_norm is not None:
            gradient = gradient * min(1.0, grad_clip_norm / (float(gradient.norm()) + 1e-6))
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        corrected = (square / (1 - beta2 ** (step + 1))).sqrt() + eps
        with torch.no_grad():
            flat -= lr[step] * (mean / (1 - beta1 ** (step + 1))) / corrected
        yield games, float(loss.detach()), flat.detach().float().numpy().copy()

"""Synchronous training through all processes equals a plain loop in this one."""

import numpy as np
import plain_loop
import pytest
from running import published_weights

import pipeline as rl
from pipeline.tasks import guess

STEPS = 5


def test_sync_mode_gives_the_tokens_losses_and_weights_of_a_plain_loop(kept, tmp_path):
    rows = guess.train_rows(0)
    optimizer = rl.Adam(lr=6e-4, grad_clip_norm=1.0, schedule=rl.Cosine(warmup=10, floor=0.1))  # as in run.py's recipe
    seen, losses, weights = [], [], []

    with kept.supervisor(device="cpu", check_weights=True) as model:
        trainer = rl.AsyncTrainer(
            engine=rl.RolloutEngine(
                model,
                env=guess.Guess,
                schedule=rl.Schedule(concurrency=64),
                budget=rl.Budget(max_turn_tokens=guess.MAX_TURN_TOKENS, max_context_tokens=128),
                seed=3,
            ),
            optimizer=optimizer,
            advantage=rl.GroupCentered(standardize=True),
            loss=rl.CISPO(normalize="token"),
            completion=rl.GroupCompletion(mode="wait"),
            groups_per_step=8,
            group_size=8,
            max_staleness=0,
            run_dir=str(tmp_path / "run"),
            validate_batch=lambda trajectories, metrics: seen.append(list(trajectories)),
        )

        def note(step):
            losses.append(step.metrics["train/loss"])
            weights.append(published_weights(model))

        rl.run(trainer, rows, steps=STEPS, on_step=note)
        config, chat = model.model_config, model.chat

    plain = plain_loop.train(
        config,
        chat,
        rows,
        seed=3,
        steps=STEPS,
        groups_per_step=8,
        group_size=8,
        lr=[optimizer.lr * (step + 1) / 10 for step in range(STEPS)],
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        eps=optimizer.eps,
        grad_clip_norm=optimizer.grad_clip_norm,
    )
    for step, (games, loss, flat) in enumerate(plain):
        assert [one.run_tokens() for one in seen[step]] == [_until_last_generated(game) for game in games], step
        assert [one.reward for one in seen[step]] == [game.reward for game in games]
        sampled = [x for one in seen[step] for s in one.spans if s.kind == "generated" for x in s.logprobs]
        expected = [x for game in games for x, own in zip(game.logprobs, game.generated, strict=True) if own]
        assert sampled == pytest.approx(expected, abs=1e-5)
        assert losses[step] == pytest.approx(loss, abs=1e-5)
        np.testing.assert_allclose(weights[step], flat, rtol=0, atol=1e-5)


def _until_last_generated(game):
    return game.ids[: len(game.generated) - game.generated[::-1].index(True)]

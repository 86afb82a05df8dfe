"""A model of windows, unrotated layers and stretched rotations trains: sampler and learner processes score alike."""

from dataclasses import replace

from running import audit, events_of, make_trainer

import pipeline as rl
from pipeline.tasks import guess
from workers.model_config import TINY
from workers.rope_scaling import RopeScaling


def test_a_model_with_windows_unrotated_layers_and_ids_without_token_trains(tmp_path):
    num_ids = rl.Supervisor(device="cpu").chat.vocab_size
    config = replace(
        TINY,
        vocab_size=num_ids + 9,
        num_token_ids=num_ids,
        num_layers=3,
        layer_windows=(6, 0, 6),  # shorter than the contexts
        nope_layers=(1, 2),
        qkv_bias=True,
        out_bias=True,
        rope=RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, attention_factor=1.2),
        max_positions=131072,
    )
    with rl.Supervisor(device="cpu", model_config=config, check_weights=True) as model:
        trainer = make_trainer(model, tmp_path / "run", optimizer=rl.Adam(lr=5e-3))
        steps = rl.run(trainer, guess.train_rows(0), steps=3)
    assert audit(tmp_path / "run") == 0
    assert len(steps) == 3 and steps[0].metrics["train/updated"]
    # The first batch is sampled from the weights that it trains.
    assert 0 < steps[0].metrics["mismatch/max_abs_logprob"] < 1e-4
    assert events_of(tmp_path / "run", "end")

"""Where warnings point, and what a misspelled option of the two large classes says."""

import warnings
from pathlib import Path

import pytest

import pipeline as rl
from pipeline.tasks import guess


def make_trainer(*, engine=None, **options):
    defaults = {
        "optimizer": rl.Adam(lr=1e-4),
        "loss": rl.CISPO(normalize="token"),
        "completion": rl.GroupCompletion(mode="wait"),
        "groups_per_step": 2,
    }
    model = rl.Supervisor(model="tiny", chat=guess.chat_format())
    return rl.AsyncTrainer(engine=rl.RolloutEngine(model, env=guess.Guess, **(engine or {})), **(defaults | options))


def caught_by(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return caught


@pytest.mark.parametrize(
    "make",
    [
        lambda: rl.KVCache(on_limit="refill", allow_reprefill=True),
        lambda: make_trainer(stale_policy="mask_span", allow_trajectory_loss=True),
        lambda: make_trainer(loss=rl.PolicyGradient(normalize="token")),
        lambda: make_trainer(
            completion=rl.GroupCompletion(mode="deadline", max_straggler_tokens=1), allow_trajectory_loss=True
        ),
        lambda: make_trainer(engine={"top_p": 0.9}),
    ],
)
def test_warning_points_at_the_users_line(make):
    (warning,) = caught_by(make)
    assert Path(warning.filename) == Path(__file__)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_trainer(max_stalenes=1), "AsyncTrainer has no option max_stalenes. Did you mean max_staleness?"),
        (lambda: make_trainer(validate_bach=print), "AsyncTrainer has no option validate_bach. Did you mean valid"),
        (lambda: make_trainer(engine={"env_args": {}}), "RolloutEngine has no option env_args. Did you mean env_arg"),
        (lambda: make_trainer(engine={"whatever": 1}), "RolloutEngine has no option whatever."),
    ],
)
def test_misspelled_option_is_refused_with_the_nearest_name(make, sentence):
    with pytest.raises(rl.ConfigTypeError) as caught:
        make()
    assert str(caught.value).startswith(sentence)

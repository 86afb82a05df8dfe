"""What users may ask of a loss: its options, when it is unsound, and where a loss of their own is looked for."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import pipeline as rl
from pipeline.commands.launch import make_supervisor, make_trainer
from pipeline.commands.make_run_config import parse
from pipeline.commands.run_config import ADVANTAGES
from pipeline.commands.workload import open_workload
from pipeline.losses import LOSSES, loss_record
from pipeline.trainer_config import EngineConfig, TrainerConfig
from pipeline.user_warnings import ConfigWarning
from workers.policy_losses.losses import LOSSES as LEARNERS
from workers.policy_losses.losses import build_loss

ROOT = Path(__file__).parent.parent.parent


def make_config(loss, **options):
    defaults = {"optimizer": rl.Adam(lr=1e-4), "completion": rl.GroupCompletion(mode="wait"), "groups_per_step": 2}
    return TrainerConfig(engine=EngineConfig(), loss=loss, **(defaults | options))


@pytest.mark.parametrize("cls", [cls for cls in LOSSES if cls is not rl.CustomLoss])
def test_learner_builds_each_loss_with_the_users_options(cls):
    built = build_loss(loss_record(cls(normalize="token")))
    assert type(built).__name__ == cls.__name__
    for name in loss_record(cls(normalize="token")).keys() - {"name"}:
        changed = build_loss(loss_record(cls(normalize="token", **{name: 0.125})))
        assert getattr(changed, name) == 0.125 != getattr(built, name)


def test_both_sides_know_the_same_losses_with_the_same_defaults():
    assert {cls.__name__ for cls in LOSSES} == LEARNERS.keys()
    for cls in LOSSES:
        if cls is not rl.CustomLoss:
            assert build_loss(loss_record(cls(normalize="sum"))) == build_loss({"name": cls.__name__})


@pytest.mark.parametrize(
    ("loss", "max_staleness", "reason"),
    [
        (rl.ImportanceSampling(normalize="token"), 2, "max_staleness=2 allows several"),
        (rl.ImportanceSampling(normalize="token"), 1, None),
        (rl.PolicyGradient(normalize="token"), 1, "older policy, which max_staleness=1"),
        (rl.PolicyGradient(normalize="token"), 0, None),
        (rl.CISPO(normalize="token"), 4, None),
        (rl.PPO(normalize="token"), 4, None),
        (rl.GSPO(normalize="token"), 4, None),
        (rl.DecoupledPPO(normalize="token"), 4, None),
    ],
)
def test_loss_that_is_unsound_for_the_ages_allowed_is_warned_of_once(loss, max_staleness, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_config(loss, max_staleness=max_staleness)
    assert [w.category for w in caught] == ([ConfigWarning] if reason else [])
    assert reason is None or reason in str(caught[0].message)


@pytest.mark.parametrize(
    ("policy", "max_staleness", "warned"), [("keep", 1, True), ("keep", 0, False), ("mask_span", 1, False)]
)
def test_uncapped_ratios_are_warned_of_where_keep_lets_tokens_get_older(policy, max_staleness, warned):
    options = {"stale_policy": policy, "allow_unbounded_staleness": True, "allow_trajectory_loss": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_config(rl.ImportanceSampling(normalize="token"), max_staleness=max_staleness, **options)
    told = [str(w.message) for w in caught if "ImportanceSampling" in str(w.message)]
    assert len(told) == warned
    assert all(f'stale_policy="{policy}" allows several' in sentence for sentence in told)


def test_command_line_warns_once_although_it_builds_the_options_twice():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = parse(["--loss", "policy_gradient", "--run-dir", "never-made"])
        trainer = make_trainer(make_supervisor(config), config, open_workload(config.workload))
    assert [w.category for w in caught] == [ConfigWarning]
    assert trainer.config.loss == rl.PolicyGradient(normalize="token")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: rl.PPO(normalize="token", clip_high=-1), ["PPO.clip_high", "-1", "at least 0"]),
        (lambda: rl.GSPO(normalize="mean"), ["GSPO.normalize", "'mean'", '"prompt"']),
        (lambda: rl.DecoupledPPO(normalize="sum", max_importance_weight=True), ["max_importance_weight", "above 0"]),
        (lambda: rl.CustomLoss("my_losses", normalize="token"), ["CustomLoss.path", "module:function"]),
        (lambda: rl.CustomLoss(":f", normalize="token"), ["CustomLoss.path", "module:function"]),
        (lambda: rl.CustomLoss("no.such:f", normalize="token"), ["'no.such:f'", "there is no module no."]),
        (lambda: rl.CustomLoss("json.nothing:f", normalize="token"), ["there is no module json.nothing."]),
        (lambda: rl.CustomLoss("json:no_such", normalize="token"), ["json/__init__.py defines no no_such."]),
        (lambda: rl.CustomLoss("__main__:f", normalize="token"), ["the script itself"]),
        (lambda: make_config(rl.CISPO(normalize="token"), kl_coefficient=-1), ["AsyncTrainer.kl_coefficient is -1"]),
        (lambda: make_config(rl.CISPO(normalize="token"), entropy_coefficient=True), ["entropy_coefficient is True"]),
        (
            lambda: make_config(
                rl.CISPO(normalize="token"),
                max_staleness=0,
                kl_coefficient=0.1,
                advantage=rl.GroupCentered(standardize="batch"),
                forward_backward_batch=rl.ForwardBackwardBatch(),
            ),
            ["kl_coefficient", "known only at the end"],
        ),
    ],
)
def test_refusal_names_option_value_and_rule(make, parts):
    with pytest.raises(rl.ConfigError) as error:
        make()
    for part in parts:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_loss_needs_a_normalisation():
    with pytest.raises(TypeError, match="normalize"):
        rl.CustomLoss("json:dumps")


def test_users_loss_is_found_without_importing_its_module(tmp_path):
    """The module would end this process, and so must not run in it; the learner alone imports it."""
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "losses.py").write_text("raise SystemExit('imported')\ndef clipped(p, q, a, m, s): ...\n")
    code = "import pipeline as rl, sys; rl.CustomLoss('my_package.losses:clipped', normalize='sum'); print('ok')"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("source", [b"def f(:", b'x = "\xff"', b"a\0b"], ids=["syntax", "encoding", "binary"])
def test_module_that_is_no_python_is_refused(tmp_path, monkeypatch, source):
    (tmp_path / "broken_losses.py").write_bytes(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(rl.ConfigError, match=r"broken_losses:f', but .*broken_losses\.py can't be read as Python"):
        rl.CustomLoss("broken_losses:f", normalize="sum")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--loss", "grpo"], ["--loss is 'grpo'", "cispo, ppo"]),
        (["--loss", "ppo", "--eps-max", "3"], ["--eps-max has no effect with the loss 'ppo'"]),
        (["--clip-low", "0.1"], ["--clip-low has no effect with the loss 'cispo'"]),
        (["--loss", "gspo", "--clip-low", "-1"], ["--clip-low is -1", "at least 0"]),
        (["--loss", "custom"], ["--loss is 'custom', which needs --loss-function"]),
        (["--loss", "custom", "--loss-function", "nowhere:f"], ["--loss-function is 'nowhere:f'", "no module nowhere"]),
        (["--kl-coefficient", "-1"], ["--kl-coefficient is -1"]),
        (["--dtype", "float16"], ["--dtype is 'float16'", "bfloat16"]),
    ],
)
def test_bad_option_of_a_loss_is_refused_as_it_was_written(arguments, parts):
    with pytest.raises(rl.ConfigError) as error:
        parse(arguments)
    for part in parts:
        assert part in str(error.value)


def test_command_line_gives_each_loss_its_own_options():
    trainer = parse(["--loss", "gspo", "--clip-high", "0.01", "--normalize", "sequence"]).trainer
    assert trainer.loss == rl.GSPO(normalize="sequence", clip_high=0.01)
    assert parse(["--loss", "decoupled_ppo"]).trainer.loss == rl.DecoupledPPO(normalize="token")
    custom = parse(["--loss", "custom", "--loss-function", "bisect:insort"]).trainer.loss
    assert custom == rl.CustomLoss("bisect:insort", normalize="token")


def test_cosine_is_a_schedule_of_adam():
    assert rl.Adam(lr=1e-3, schedule=rl.cosine(10, 0.1)).schedule == rl.Cosine(warmup=10, floor=0.1)
    assert rl.cosine() == rl.Cosine()
    with pytest.raises(rl.ConfigError, match="Cosine.floor is 2"):
        rl.cosine(floor=2)


def test_dtype_of_the_supervisor_is_checked():
    assert rl.Supervisor(device="cpu", dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(rl.ConfigError, match="dtype is 'float64'"):
        rl.Supervisor(device="cpu", dtype="float64")


def test_loss_of_the_guide_is_a_loss():
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(block, names)
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages, mask, ages = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([True, True, False]), torch.tensor([0, 2, 1])
    losses = names["younger_counts_more"](logprobs, logprobs.detach(), advantages, mask, ages)
    assert losses.tolist() == pytest.approx([1.0, -2.0 * 0.81, 0.0])
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.81, 0.0])


def test_guide_names_every_loss_and_advantage():
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert all(f"`{cls.__name__}" in page for cls in LOSSES)
    assert all(name in page for name in ADVANTAGES)


def test_learner_looks_for_a_loss_where_an_interactive_session_does(tmp_path, monkeypatch):
    """There the current directory is an empty entry of sys.path, and the learner's has none."""
    (tmp_path / "losses_here.py").write_text("def f(p, q, a, m, s):\n    return -p * a\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rl.ConfigError, match="no module losses_here"):
        rl.CustomLoss("losses_here:f", normalize="sum")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert str(tmp_path) in loss_record(rl.CustomLoss("losses_here:f", normalize="sum"))["sys_path"]


def test_loss_may_be_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "by_file.py").write_text("def f(p, q, a, m, s):\n    return -p * a\n")
    monkeypatch.chdir(tmp_path)
    assert loss_record(rl.CustomLoss("by_file.py:f", normalize="sum"))["path"] == f"{tmp_path}/by_file.py:f"
    with pytest.raises(rl.ConfigError, match=r"The loss 'by_fil.py:f' can't be imported: .* Did you mean by_file.py"):
        rl.CustomLoss("by_fil.py:f", normalize="sum")

"""A real model, SmolLM2-135M-Instruct, as `make run-smollm2` trains it: three asynchronous steps on a task with a tool,
within the bounds that are promised, then exported and loaded by transformers.

The model is fetched once into models/ (95 MB), as the make target does.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_py import ROOT, audit

from bench import fetch_smollm2
from tests.model_logits import our_logits

transformers = pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
pytest.importorskip("gguf", reason="gguf (extra hf) is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
RECIPE = ROOT / "recipes" / "smollm2-calculator.toml"
STEPS = 3
MAX_MISMATCH = 1e-3  # of a log-prob between sampler and learner, in float32
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the directory of a completed run, its exported model)"""
    if not (MODEL / "config.json").is_file():
        assert fetch_smollm2.main([str(MODEL)]) == 0
    root = tmp_path_factory.mktemp("smollm2")
    run_dir, exported = root / "run", root / "exported"
    python("run.py", "--config", RECIPE, "--model", MODEL, "--device", "cpu", "--run-dir", run_dir)
    python("-c", "import sys; from pipeline.commands.entry import main; sys.exit(main())", "export", run_dir, exported)
    return run_dir, exported


def python(*arguments):
    """A command of the user's, in a process of its own."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def tokens_of(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@torch.inference_mode()
def test_the_fetched_model_is_the_model(run):
    model, prompt = load(MODEL), tokens_of(MODEL)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    text = transformers.AutoTokenizer.from_pretrained(MODEL).decode(answer)
    assert text == "The capital of France is Paris.<|im_end|>"
    tokens = prompt.input_ids[0]
    torch.testing.assert_close(our_logits(MODEL, tokens), model(tokens[None]).logits[0], rtol=0, atol=1e-3)


def test_every_step_keeps_the_bounds_that_are_promised(run):
    steps = lines(run[0] / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["train/updated"] == 1 for step in steps)
    assert all(step["staleness/span_age_max"] <= 2 for step in steps)
    measured = [step["mismatch/max_abs_logprob"] for step in steps if "mismatch/max_abs_logprob" in step]
    assert measured and max(measured) <= MAX_MISMATCH
    # The first batch holds nothing but tokens of age 0: there sampler and learner are the same policy.
    assert steps[0]["staleness/span_age_max"] == 0
    assert abs(steps[0]["importance/ratio_mean"] - 1) <= MAX_MISMATCH
    assert abs(steps[0]["importance/ratio_max"] - 1) <= 2 * MAX_MISMATCH
    audited = audit(run[0])
    assert audited.returncode == 0, audited.stdout


def test_turns_stay_within_their_tokens_and_tools_are_called(run):
    events = lines(run[0] / "events.jsonl")
    assert max(event["tokens"] for event in events if event["event"] == "segment") <= 96
    calls = [event for event in events if event["event"] == "tool"]
    assert any(event["error"] is None for event in calls)


@torch.inference_mode()
def test_the_exported_model_is_the_trained_one_in_transformers(run):
    _, exported = run
    model, source = load(exported), load(MODEL)
    tokens = tokens_of(exported).input_ids[0]
    assert torch.equal(tokens, tokens_of(MODEL).input_ids[0])
    theirs = model(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(exported, tokens), theirs, rtol=0, atol=1e-3)
    assert not torch.equal(theirs, source(tokens[None]).logits[0]), "nothing was trained"
    assert model.config.tie_word_embeddings and str(model.dtype) == "torch.float32"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (exported / name).is_file(), name
    assert sorted(path.name for path in Path(exported).iterdir() if path.suffix == ".safetensors") == [
        "model.safetensors"
    ]

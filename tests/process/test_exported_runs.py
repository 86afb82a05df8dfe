"""From a run to a directory that transformers loads, with the logits of our own decoder."""

import pytest
import torch
from running import make_trainer, use

import pipeline as rl
from bench.small_models import IM_END, write_small_model
from pipeline.commands import cli
from pipeline.models.model_directory import open_model
from pipeline.tasks import guess
from tests.model_logits import our_logits

transformers = pytest.importorskip("transformers", reason="transformers (extra `hf`) is not installed")

ROWS = guess.train_rows(0)
VOCAB_SIZE = guess.chat_format().vocab_size  # the words of `guess` are the models' first ids


@pytest.fixture(scope="module")
def model(kept):
    with kept.supervisor(device="cpu") as supervisor:
        yield supervisor


def export(training, out):
    """The run's weights in `out`; what our decoder and transformers compute from there is the same."""
    assert cli.main(["export", str(training.run_directory), str(out)]) == 0
    tokens = torch.arange(40) * 7 % VOCAB_SIZE
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        theirs = loaded(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(out, tokens), theirs, atol=1e-4, rtol=1e-4)
    return loaded


def test_a_tiny_run_becomes_a_model_that_transformers_loads(model, tmp_path):
    training = make_trainer(model, tmp_path / "run")
    rl.run(training, ROWS, steps=2)
    exported = export(training, tmp_path / "out")
    assert exported.config.model_type == "llama"
    assert exported.generation_config.eos_token_id == list(guess.chat_format().stop_ids)
    tokens = torch.arange(40) % VOCAB_SIZE
    assert torch.equal(our_logits(tmp_path / "out", tokens), our_logits(training.checkpoint, tokens))


@pytest.mark.parametrize(("family", "dtype", "tie"), [("qwen3", "bfloat16", True), ("smollm3", "float16", False)])
def test_a_trained_model_directory_comes_back_in_its_own_form(model, tmp_path, family, dtype, tie):
    source = write_small_model(tmp_path / "model", family=family, dtype=dtype, tie=tie)
    use(model, open_model(source, chat=guess.chat_format()))
    training = make_trainer(model, tmp_path / "run")
    rl.run(training, ROWS, steps=100, on_step=lambda step: training.request_stop())
    exported = export(training, tmp_path / "out")
    assert exported.config.model_type == family
    assert exported.config.tie_word_embeddings is tie
    kept = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(kept.dtype) == f"torch.{dtype}"
    before = transformers.AutoTokenizer.from_pretrained(source)
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "What is twelve plus thirty?"}]
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)
    assert after.eos_token == IM_END
    assert kept.generation_config.eos_token_id == [before.convert_tokens_to_ids(IM_END), before.pad_token_id]

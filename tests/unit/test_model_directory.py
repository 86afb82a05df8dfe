"""What a user may call a model: a directory is opened whole, chat format included, and its faults are told."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import pipeline as rl
from bench.small_models import FAMILIES, NUM_PADDED, write_json, write_small_model
from pipeline.checkpoints.model_files import model_dtype, read_model_files
from pipeline.models.model_directory import open_model, with_ids_of
from pipeline.tasks import guess
from pipeline.user_warnings import RunWarning
from tests.complete_checkpoints import complete
from workers.model import init_flat
from workers.model_config import TINY
from workers.model_files.config import to_hf_config
from workers.model_files.flat_weights import save_weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "whole", dtype="bfloat16")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_is_opened_with_its_shape_its_speech_and_its_ids(family, tmp_path):
    directory = write_small_model(tmp_path / family, family=family, tie=False)
    source = open_model(directory)
    assert (source.directory, source.weights, source.dtype) == (str(directory), str(directory), "float32")
    assert source.config.vocab_size - source.config.num_token_ids == NUM_PADDED
    assert source.config.num_token_ids == source.chat.vocab_size
    prompt = source.chat.render_prompt([{"role": "user", "content": "12 + 30"}], [])
    assert len(prompt) > 5 and max(prompt) < source.config.num_token_ids


def test_an_id_that_the_tokenizer_skips_is_none_of_the_models(copy):
    values = json.loads((copy / "tokenizer.json").read_text())
    hole = values["model"]["vocab"].pop("z")
    values["model"]["vocab"] |= {token["content"]: token["id"] for token in values["added_tokens"]}
    write_json(copy / "tokenizer.json", values)
    found = open_model(copy).config
    assert (found.unused_ids, found.num_token_ids) == ((hole,), values["added_tokens"][-1]["id"] + 1)


def test_supervisor_takes_a_path_and_its_weights_reach_the_run(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    model = rl.Supervisor("whole", device="cpu")
    assert model.source.directory == str(whole) == model.source.weights
    assert (model.source.dtype, model.dtype) == ("bfloat16", "float32")
    assert model.model_config.num_layers == 2
    json.dumps(model.source.describe())  # config.json holds it


def test_a_chat_of_ones_own_replaces_the_directorys(whole):
    chat = guess.chat_format()
    model = rl.Supervisor(whole, chat=chat, device="cpu")
    assert model.chat is chat
    assert model.model_config.num_token_ids == chat.vocab_size < model.model_config.vocab_size
    with pytest.raises(rl.ConfigError, match="tool_format belong to a model directory, and a chat format of your own"):
        rl.Supervisor(whole, chat=chat, tool_format="hermes", device="cpu")


def test_template_options_reach_the_template(copy):
    (copy / "chat_template.jinja").write_text(
        "{%- for message in messages %}{{ message.role + ': ' + message.content + '<|im_end|>' }}{%- endfor %}"
        "{{ 'think ' if think else 'answer ' }}"
    )
    messages = [{"role": "user", "content": "x"}]
    plain = open_model(copy).chat.render_prompt(messages, [])
    assert open_model(copy, template_options={"think": True}).chat.render_prompt(messages, []) != plain


def test_init_gives_the_weights_and_the_model_all_else(whole, tmp_path):
    other = write_small_model(tmp_path / "other", seed=1)
    source = open_model(whole, init=other)
    assert (source.directory, source.weights, source.dtype) == (str(whole), str(other), "float32")
    wider = write_small_model(tmp_path / "wider", intermediate_size=160, rope_theta=5e5)
    found = (
        r"wider are of another model than .*: intermediate_size 160 \(here 128\), rope_theta 500000.0 \(here 10000.0\);"
    )
    with pytest.raises(rl.ConfigError, match=found):
        open_model(whole, init=wider)
    longer = write_small_model(tmp_path / "longer", max_position_embeddings=8192)
    assert open_model(whole, init=longer).weights == str(longer)


def test_init_of_a_run_is_its_newest_checkpoint(whole, tmp_path):
    run = tmp_path / "run"
    for version in (9, 10):
        complete(shutil.copytree(whole, run / "checkpoints" / f"version-{version}"))
    (run / "events.jsonl").touch()
    assert open_model(whole, init=run).weights == str(run / "checkpoints" / "version-10")
    with pytest.raises(rl.ConfigError, match="model is .*run, the directory of a run"):
        open_model(run)
    weights = run / "checkpoints" / "version-10" / "model.safetensors"
    *all_but_last, last = weights.read_bytes()
    weights.write_bytes(bytes([*all_but_last, last ^ 1]))
    with pytest.warns(RunWarning, match="version-10 is damaged: its model.safetensors is not what was saved"):
        assert open_model(whole, init=run).weights == str(run / "checkpoints" / "version-9")
    with pytest.raises(rl.ConfigError, match="version-10 is damaged"):
        open_model(weights.parent)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(rl.ConfigError, match="holds no complete checkpoint"):
        open_model(whole, init=run)


def test_tiny_starts_from_a_tiny_models_weights(tmp_path):
    config = rl.Supervisor(device="cpu").model_config
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "version-3"
    checkpoint.mkdir(parents=True)
    (run / "events.jsonl").touch()
    write_json(checkpoint / "config.json", to_hf_config(config))
    save_weights(checkpoint / "model.safetensors", init_flat(config, 0), config)
    complete(checkpoint)
    assert rl.Supervisor(init=run, device="cpu").source.weights == str(checkpoint)
    chat = rl.TinyChat(["other", "words"])
    with pytest.raises(rl.ConfigError, match=r"another model than tiny: vocab_size 23 \(here 8\);"):
        rl.Supervisor(init=run, chat=chat, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"model": "missing"}, ["model is 'missing'", 'neither "tiny" nor a directory']),
        (
            {"model": "Qwen/Qwen3-0.6B"},
            ["nothing is downloaded", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"],
        ),
        ({"model": "/dev/null"}, ["is no directory", "the directory that it lies in"]),
        ({"init": "missing"}, ["init is 'missing'", "no directory"]),
        ({"template_options": {"a": 1}}, ["template_options and tool_format belong to a model directory", "tiny"]),
        ({"tool_format": "xml"}, ["tool_format is 'xml'", '"hermes"']),
        ({"kv_gib": 0}, ["kv_gib is 0", "above 0"]),
        ({"worker_timeout": 0}, ["worker_timeout is 0", "above 0"]),
        ({"max_restarts": -1}, ["max_restarts is -1", "at least 0"]),
    ],
)
def test_what_is_no_model_is_refused(arguments, parts):
    with pytest.raises(rl.ConfigError) as error:
        rl.Supervisor(**arguments, device="cpu")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("options", ["a=1", ["a"], {1: 2}, {"tools": object()}])
def test_template_options_that_are_no_plain_values_by_name_are_refused(options, whole):
    with pytest.raises(TypeError, match="template_options is .*; give a dict of the template's variables by name"):
        rl.Supervisor(whole, template_options=options, device="cpu")


def test_a_model_config_belongs_to_tiny(whole):
    with pytest.raises(rl.ConfigError, match='model_config is that of "tiny"'):
        rl.Supervisor(whole, model_config=TINY, device="cpu")


def edit_config(directory, **values):
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text()) | values)


def edit_tokens(directory, **values):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    write_json(path, tokenizer | {"model": tokenizer["model"] | values})


@pytest.mark.parametrize(
    ("file", "part"), [("adapter_model.safetensors", "merge_and_unload"), ("m.gguf", "gguf_file=")]
)
@pytest.mark.parametrize("argument", ["model", "init"])
def test_weights_of_another_form_alone_are_told_from_nothing(argument, file, part, tmp_path):
    (tmp_path / file).touch()
    with pytest.raises(rl.ConfigError, match=part):
        rl.Supervisor(**{argument: tmp_path}, device="cpu")


@pytest.mark.parametrize("dtype", ["float64", "auto", 7])
def test_a_dtype_that_no_export_could_have_is_refused_before_training(dtype, copy):
    edit_config(copy, torch_dtype=dtype)
    with pytest.raises(
        rl.ConfigError, match=f"names the dtype {dtype!r}; it must be one of float32, bfloat16, float16"
    ):
        read_model_files(copy)


def test_the_dtype_is_the_newer_keys_or_that_of_the_tensors(copy):
    edit_config(copy, torch_dtype=None)
    assert json.loads(read_model_files(copy)["config.json"])["dtype"] == "bfloat16"
    edit_config(copy, torch_dtype="float32", dtype="float16")
    assert model_dtype(copy) == "float16"


def test_a_tokenizer_may_fill_the_embedding(whole):
    source = open_model(whole)
    full = replace(source.config, vocab_size=source.chat.vocab_size)
    assert with_ids_of(full, source.chat, whole).num_token_ids == full.vocab_size


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_config_that_was_touched_after_the_model_was_opened_is_told(text, copy):
    open_model(copy)
    (copy / "config.json").unlink()
    if text is not None:
        (copy / "config.json").write_text(text)
    with pytest.raises(rl.ConfigError, match="config.json is no longer what it was"):
        read_model_files(copy)


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda directory: (directory / "model.safetensors").unlink(), "no weights"),
        (truncate, "model.safetensors"),
        (lambda directory: (directory / "config.json").write_text("{"), "config.json"),
        (lambda directory: (directory / "config.json").unlink(), "config.json"),
        (lambda directory: edit_config(directory, model_type="mamba"), "mamba"),
        (lambda directory: edit_config(directory, num_hidden_layers=3), "missing model.layers.2"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda directory: (directory / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda directory: (directory / "chat_template.jinja").unlink(), "chat template"),
        (lambda directory: edit_config(directory, vocab_size=200), "ids up to"),
        (lambda directory: (directory / "adapter_config.json").touch(), "an adapter (adapter_config.json) beside a"),
        (lambda directory: edit_tokens(directory, vocab=7), 'The "vocab" of'),
        (lambda directory: edit_tokens(directory, vocab=[{}]), 'The "vocab" of'),
    ],
    ids=["weights", "cut", "json", "config", "family", "layers", "tokenizer", "tokens", "template", "vocabulary"]
    + ["adapter", "number", "entry"],
)
def test_a_directory_with_a_fault_is_refused_in_one_sentence(damage, part, copy):
    damage(copy)
    with pytest.raises(rl.ConfigError) as error:
        rl.Supervisor(copy, device="cpu")
    assert part in str(error.value) and "\n" not in str(error.value)


def test_opening_a_model_loads_no_torch(whole):
    code = f"import sys, pipeline as rl; rl.Supervisor({str(whole)!r}, device='cpu'); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

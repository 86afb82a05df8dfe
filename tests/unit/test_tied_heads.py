"""HR20: the flag that ties head and embedding, against what the file holds; a head is never made up."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.small_models import write_json, write_small_model, write_tensors
from workers.errors import CheckpointError
from workers.model import bind_weights
from workers.model_files.config import read_model_config
from workers.model_files.flat_weights import load_flat
from workers.model_files.tensor_files import SINGLE

CASE = Path(__file__).parent.parent / "data" / "cases" / "HR20" / "variants.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_variant(directory, variant, family):
    """One of HR20's variants: `tie_word_embeddings` of config.json, and the head that the file holds."""
    write_small_model(directory, family=family)
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = variant["tie_word_embeddings"]
    if config["tie_word_embeddings"] == "key absent":
        del config["tie_word_embeddings"]
    write_json(directory / "config.json", config)
    tensors = load_file(directory / SINGLE)
    heads = {"equal copy": tensors[EMBEDDING].clone(), "different values": tensors[EMBEDDING] + 1.0}
    if variant["lm_head_in_file"]:
        write_tensors(directory, tensors | {HEAD: heads[variant["lm_head_in_file"]]})
    return directory


def load(directory):
    config = read_model_config(directory)
    return bind_weights(load_flat(directory, config), config)


VARIANTS = json.loads(CASE.read_text())
OUTCOMES = {  # of each variant; the last one has no flag, whose default differs between families
    "llama": ["one storage", "one storage", "differs", "missing", "missing"],
    "smollm3": ["one storage", "one storage", "differs", "missing", "one storage"],
}


@pytest.mark.parametrize("family", OUTCOMES)
@pytest.mark.parametrize("number", range(5))
def test_flag_and_file_must_agree_about_the_head(tmp_path, number, family):
    directory = write_variant(tmp_path / "model", VARIANTS[number], family)
    outcome = OUTCOMES[family][number]
    if outcome == "one storage":
        weights = load(directory)
        assert weights.head.data_ptr() == weights.embed.data_ptr()
        assert torch.equal(weights.head, load_file(directory / SINGLE)[EMBEDDING])
        return
    with pytest.raises(CheckpointError) as error:
        load(directory)
    assert {"differs": f"its {HEAD} differs from {EMBEDDING}", "missing": f"missing {HEAD}."}[outcome] in str(
        error.value
    )


@pytest.mark.parametrize("family", OUTCOMES)
def test_an_untied_head_is_its_own(tmp_path, family):
    directory = write_small_model(tmp_path / "model", family=family, tie=False)
    weights = load(directory)
    assert torch.equal(weights.head, load_file(directory / SINGLE)[HEAD])
    assert weights.head.data_ptr() != weights.embed.data_ptr()


def test_a_copy_in_another_dtype_is_no_equal(tmp_path):
    directory = write_small_model(tmp_path / "model")
    tensors = load_file(directory / SINGLE)
    write_tensors(directory, tensors | {HEAD: tensors[EMBEDDING].bfloat16()})
    with pytest.raises(CheckpointError, match="differs"):
        load(directory)


def test_one_changed_value_in_a_copy_is_found(tmp_path):
    directory = write_small_model(tmp_path / "model")
    tensors = load_file(directory / SINGLE)
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1e-4
    write_tensors(directory, tensors | {HEAD: head})
    with pytest.raises(CheckpointError, match="differs"):
        load(directory)


def test_a_copy_of_the_same_bytes_in_another_form_is_no_equal(tmp_path):
    directory = write_small_model(tmp_path / "model", dtype="bfloat16")
    tensors = load_file(directory / SINGLE)
    embedding = tensors[EMBEDDING]
    for head in (embedding.view(torch.float16), embedding.view(embedding.shape[1], -1)):
        write_tensors(directory, tensors | {HEAD: head.clone()})
        with pytest.raises(CheckpointError, match="differs"):
            load(directory)

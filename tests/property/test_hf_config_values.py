"""Whatever stands in a config.json: a decoder that can be computed, or one sentence that says why not."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.errors import ModelConfigError
from workers.model_config import ModelConfig, layout
from workers.model_files.config import DEFAULTS, parse_model_config, to_hf_config
from workers.rope_scaling import KINDS, frequencies

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([0, 1, 2, 64, 4096, 10**6, 2**31, 10**30, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0.01, 100),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)
ROPE_KEYS = [
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "rope_theta", "partial_rotary_factor", "other",
]  # fmt: skip
ROPES = st.builds(
    lambda kind, spelling, keys: {spelling: kind} | keys,
    st.sampled_from([*KINDS, "longrope"]),
    st.sampled_from(["type", "rope_type"]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=6),
)
SOUND_ROPES = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(KINDS),
        "factor": st.floats(1, 64),
        "original_max_position_embeddings": st.integers(1, 5000),
        "low_freq_factor": st.floats(0.5, 2),
        "high_freq_factor": st.floats(2.5, 8),
    },
    optional={
        "rope_theta": st.floats(1.001, 1e7),
        "attention_factor": st.floats(0.1, 3),
        "mscale": st.floats(0, 2),
        "mscale_all_dim": st.floats(0, 2),
        "beta_fast": st.floats(2, 64),
        "beta_slow": st.floats(0.1, 2),
        "truncate": st.booleans(),
    },
)
LAYER_TYPES = st.lists(st.sampled_from(["full_attention", "sliding_attention", "chunked_attention"]), max_size=3)
KEYS = {
    **{name: SCALARS for defaults in DEFAULTS.values() for name in defaults},
    "rope_scaling": st.one_of(ROPES, VALUES),
    "rope_parameters": st.one_of(ROPES, VALUES),
    "layer_types": st.one_of(LAYER_TYPES, VALUES),
    "no_rope_layers": st.one_of(st.lists(st.integers(0, 1), max_size=3), VALUES),
    "no_rope_layer_interval": SCALARS,
    "use_sliding_window": SCALARS,
    "max_window_layers": SCALARS,
    "attention_bias": SCALARS,
    "hidden_act": VALUES,
    "quantization_config": VALUES,
    "num_experts": VALUES,
    "anything_else": VALUES,
}
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": None,
}


@st.composite
def files(draw):
    values = SMALL | {"model_type": draw(st.sampled_from(sorted(DEFAULTS)))}
    if draw(st.booleans()):
        values[draw(st.sampled_from(["rope_scaling", "rope_parameters"]))] = draw(SOUND_ROPES)
    for name in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=3)):
        values[name] = draw(KEYS[name])
    return values


@settings(max_examples=600, deadline=None)
@given(files())
def test_a_file_is_read_whole_or_refused_in_one_sentence(values):
    try:
        config = parse_model_config(values, "DIR/config.json")
    except ModelConfigError as error:
        assert str(error).startswith("DIR/config.json") and "\n" not in str(error) and len(str(error)) < 700
        return
    assert layout(config).num_elements > 0
    assert ModelConfig.from_fields(json.loads(json.dumps(config.to_fields()))) == config
    turns = frequencies(config.rope, config.rope_theta, config.head_dim)
    assert len(turns) == config.head_dim // 2
    assert all(math.isfinite(turn) and turn >= 0 for turn in turns)


@settings(max_examples=300, deadline=None)
@given(files())
def test_what_was_read_is_written_so_that_it_reads_the_same(values):
    try:
        config = parse_model_config(values)
    except ModelConfigError:
        return
    again = parse_model_config(json.loads(json.dumps(to_hf_config(config))))
    assert again == config

"""The two ways in which a config.json says how its model rotates, and the one that we write.

Older files have `rope_theta` and `rope_scaling` (whose kind is `type` or `rope_type`), newer ones `rope_parameters`,
which holds theta as well.
"""

from typing import Any

from workers.errors import ModelConfigError
from workers.model_files.json_keys import ConfigFile
from workers.rope_scaling import KINDS, RopeScaling, yarn_attention_factor

_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_ORIGINAL = "original_max_position_embeddings"
# `finetuned` notes how a checkpoint was made.
_OTHERS = ("type", "rope_type", "rope_theta", "factor", _ORIGINAL, "partial_rotary_factor", "finetuned")
_KNOWN = {*_OTHERS, *_YARN, *_LLAMA3}


def read_rope(keys: ConfigFile, max_positions: int) -> tuple[RopeScaling, float]:
    """(scaling, theta) of a config.json; ModelConfigError for a kind or a key that this decoder does not apply."""
    found = {name: _object(keys, name) for name in ("rope_scaling", "rope_parameters")}
    old, new = found["rope_scaling"], found["rope_parameters"]
    if old and new and old != new:
        keys.refuse("rope_scaling", old, f"rope_parameters says something else ({new!r:.100}): keep one of the two")
    name = "rope_scaling" if old else "rope_parameters"
    given = {key: value for key, value in (old or new).items() if value is not None}
    # Numbers of the nested object are read, and refused, under their whole name.
    inner = ConfigFile(f"{keys.where}: {name}", given, {})
    if unknown := sorted(set(given) - _KNOWN):
        inner.refuse(f"{unknown[0]!r:.60}", given[unknown[0]], f"known keys there are {', '.join(sorted(_KNOWN))}")
    for owner in (inner, keys):
        share = owner.values.get("partial_rotary_factor")
        if share is not None and (type(share) not in (int, float) or share != 1):
            owner.refuse("partial_rotary_factor", share, "supported is rotating whole heads, 1.0")
    theta = inner.number("rope_theta") if "rope_theta" in given else keys.number("rope_theta")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        inner.refuse("rope_type" if "rope_type" in given else "type", kind, f"supported are {', '.join(KINDS)}")
    if kind == "default":
        return RopeScaling(), theta
    try:
        return _scaling(kind, inner, keys, max_positions), theta
    except ModelConfigError as error:
        raise error if str(error).startswith(keys.where) else ModelConfigError(f"{inner.where}: {error}") from None


def rope_keys(rope: RopeScaling, theta: float) -> dict[str, Any]:
    """The keys of a config.json for it, in the older form, which every reader knows."""
    written: dict[str, Any] = {"rope_theta": theta}
    if rope.kind == "default":
        return written
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling[_ORIGINAL] = rope.original_max_positions
    names = {"llama3": _LLAMA3, "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate")}.get(rope.kind, ())
    return written | {"rope_scaling": scaling | {name: getattr(rope, name) for name in names}}


def _object(keys: ConfigFile, name: str) -> dict[str, Any]:
    value = keys.values.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        keys.refuse(name, value, "give an object, or null")
    return value


def _scaling(kind: str, inner: ConfigFile, keys: ConfigFile, max_positions: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling(kind=kind, factor=inner.number("factor", None, least=1.0))
    if kind == "dynamic":  # the length from which it changes anything is the model's own, whatever else is written
        factor = inner.number("factor", None, least=1.0)
        return RopeScaling(kind=kind, factor=factor, original_max_positions=max_positions)
    # One beside the object counts before the one in it; neither: the model was not extended.
    owner = keys if keys.values.get(_ORIGINAL) is not None else inner
    original = owner.count(_ORIGINAL, max_positions)
    if kind == "llama3":
        numbers = {name: inner.number(name, None) for name in ("factor", *_LLAMA3)}
        return RopeScaling(kind=kind, original_max_positions=original, **numbers)
    # Without a factor, yarn stretches to all the positions that the model has.
    factor = inner.number("factor", max_positions / original, least=1.0)
    mscales = [inner.number(name) if inner.values.get(name) else None for name in ("mscale", "mscale_all_dim")]
    grown = yarn_attention_factor(factor, *mscales)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_positions=original,
        attention_factor=inner.number("attention_factor", grown),
        beta_fast=inner.number("beta_fast", 32.0) if inner.values.get("beta_fast", 32) else 32.0,
        beta_slow=inner.number("beta_slow", 1.0) if inner.values.get("beta_slow", 1) else 1.0,
        truncate=inner.flag("truncate", True),
    )

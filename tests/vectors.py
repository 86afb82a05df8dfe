"""The behaviour vectors: `tests/data/vectors`, or the directory that HEADWAY_VECTORS names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = Path(os.environ.get("HEADWAY_VECTORS") or Path(__file__).parent / "data" / "vectors")


def load(kind: str) -> list[Any]:
    """One pytest parameter per vector of `<kind>.json`; a single skipped one if the directory lacks the file."""
    path = DIRECTORY / f"{kind}.json"
    if not path.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"{path} does not exist"))]
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != 1 or content["kind"] != kind or not content["vectors"]:
        raise ValueError(f"{path} holds no vectors of format 1 and kind {kind}.")
    return [pytest.param(vector, id=vector.get("name", f"{kind}-{i}")) for i, vector in enumerate(content["vectors"])]

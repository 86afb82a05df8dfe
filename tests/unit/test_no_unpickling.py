"""Nothing of ours unpickles or executes what a file, a socket or shared memory holds: the source is searched for it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(path for folder in ("shm", "workers", "pipeline") for path in (ROOT / folder).rglob("*.py"))
FILES.append(ROOT / "run.py")

# Modules that unpickle, or execute what they read.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}
UNSAFE_MODULES |= {"multiprocessing", "concurrent.futures.process"}  # their queues and pipes pickle
UNSAFE_MODULES |= {"torch.load", "torch.jit", "torch.hub", "torch.package"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}  # as builtins
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "loads_pickle", "load_module"}


def unsafe(source: str) -> list[str]:
    """What a file does that it must not, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [f"{node.lineno}: {what}" for what in unsafe_import(node)]
        if isinstance(node, ast.Call):
            found += [f"{node.lineno}: {what}" for what in unsafe_call(node)]
    return found


def unsafe_import(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        names = {f"{node.module}.{name}" for name in names}
    found = [name for name in names for one in UNSAFE_MODULES if f"{name}.".startswith(f"{one}.")]
    # By another name `unsafe_call` would not know it.
    found += [f"torch as {alias.asname}" for alias in node.names if alias.name == "torch" and alias.asname]
    return [f"imports {what}" for what in found]


def unsafe_call(node: ast.Call) -> list[str]:
    arguments = {word.arg: word.value for word in node.keywords}
    match node.func:
        case ast.Name(id=name) if name in UNSAFE_NAMES:
            return [f"calls {name}"]
        case ast.Attribute(attr=name) if name in UNSAFE_METHODS:
            return [f"calls {name}"]
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            weights_only = arguments.get("weights_only")
            if not (isinstance(weights_only, ast.Constant) and weights_only.value is True):
                return ["calls torch.load without weights_only=True"]
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if (
            f"torch.{name}" in UNSAFE_MODULES
        ):
            return [f"calls torch.{name}"]
        case ast.Attribute(attr="load") if "allow_pickle" in arguments:
            return ["loads with allow_pickle"]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_unpickles(path):
    assert unsafe(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from yaml import load",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch as t\nt.load(path)",
        "from torch import load",
        "from torch import package",
        "import torch.jit",
        "torch.jit.load(path)",
        "torch.hub.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
        "eval(text)",
    ],
)
def test_the_search_finds_what_unpickles(source):
    assert unsafe(source)


def test_the_search_lets_pass_what_is_safe():
    assert not unsafe("import torch, re\ntorch.load(path, weights_only=True)\nre.compile('x')\nmodel.eval()")

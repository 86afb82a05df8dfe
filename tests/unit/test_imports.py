"""Imports run one way, run.py -> pipeline -> workers -> shm; and what must be light loads no torch."""

import ast
import configparser
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

ROOT = Path(__file__).parent.parent.parent
LAYERS = ["run.py", "pipeline", "workers", "shm"]
FILES = [ROOT / "run.py", *sorted(path for layer in LAYERS[1:] for path in (ROOT / layer).rglob("*.py"))]
ALL_FILES = FILES + sorted(path for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py"))

WITHOUT_TORCH = [
    "pipeline",
    "pipeline.chat.model_chat",
    "pipeline.commands.cli",
    "pipeline.adapters.reasoning_gym",
    "pipeline.user_code.probe_process",
    "pipeline.environments.process",
    "pipeline.commands.launch",
    "shm.block",
    "shm.errors",
    "shm.gate",
    "shm.layout",
    "shm.ledger",
    "shm.queue",
    "workers.model_files.tensor_files",
    "workers.machine.devices",
    "workers.message_codec",
    "workers.messages",
    "workers.model_config",
]


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: write the whole name, not a relative import"
            modules |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return modules


def test_there_are_files_in_every_layer():
    for layer in LAYERS:
        assert any(path.relative_to(ROOT).parts[0] == layer for path in FILES), layer


def test_imports_run_one_way():
    wrong = {}
    for path in FILES:
        layer = LAYERS.index(path.relative_to(ROOT).parts[0])
        above = {name.removesuffix(".py") for name in LAYERS[:layer]} | {"bench", "tests"}
        if found := {module for module in imported_modules(path) if module.split(".")[0] in above}:
            wrong[str(path.relative_to(ROOT))] = sorted(found)
    assert wrong == {}


def package_of(module: str) -> str:
    """The folder in which a module, or a name in one, is."""
    parts = module.split(".")
    while not ROOT.joinpath(*parts).is_dir():
        parts.pop()
    return ".".join(parts)


@pytest.mark.parametrize("layer", ["pipeline", "workers"])
def test_packages_form_no_circle(layer):
    """Packages within packages too: each is taken for itself. What is in the layer's own folder may need any."""
    needs: dict[str, set[str]] = {}
    for path in sorted((ROOT / layer).rglob("*/*.py")):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        ours = {module for module in imported_modules(path) if module.startswith(f"{layer}.")}
        needs.setdefault(package, set()).update({package_of(module) for module in ours} - {package, layer})
    assert len(needs) > 1
    while free := {package for package, of in needs.items() if not of}:  # those that need no other go, again and again
        needs = {package: of - free for package, of in needs.items() if package not in free}
    assert needs == {}


def test_benches_import_no_test():
    files = sorted((ROOT / "bench").rglob("*.py"))
    assert files and not [p for p in files if any(m.split(".")[0] == "tests" for m in imported_modules(p))]


def test_sampler_and_learner_never_import_each_other():
    assert not {m for m in imported_modules(ROOT / "workers" / "sampler.py") if m.startswith("workers.learner")}
    assert not {m for m in imported_modules(ROOT / "workers" / "learner.py") if m.startswith("workers.sampler")}


def test_the_audit_imports_nothing_of_ours():
    ours = {"run", "pipeline", "workers", "shm", "bench"}
    assert not {m for m in imported_modules(ROOT / "pipeline" / "audit.py") if m.split(".")[0] in ours}


def test_public_names_are_those_that_editors_see():
    """A name's module is imported when it is first used; who reads code without running it has a copy of that table."""
    tree = ast.parse((ROOT / "pipeline" / "__init__.py").read_text(encoding="utf-8"))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If)]
    from_module = {(node.module, name.name) for node in seen.body for name in node.names}
    assert from_module == {(module, name) for name, module in pipeline._MODULE_OF.items()}
    assert sorted(pipeline.__all__) == sorted([*pipeline._MODULE_OF, "__version__"])
    for name in pipeline.__all__:
        assert getattr(pipeline, name) is not None and name in dir(pipeline)
    with pytest.raises(AttributeError, match="module 'pipeline' has no attribute 'AsyncTrainr'"):
        pipeline.AsyncTrainr  # noqa: B018 (looked up, and not there)


def test_environment_process_loads_nothing_of_the_trainer():
    """It is started for every run, and again after users' code has brought it down."""
    code = "import sys, pipeline.environments.process, pipeline.tasks.guess; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"pipeline.trainer", "pipeline.supervisor", "pipeline.schedule", "jinja2"} & set(done.stdout.split())


def test_modules_load_without_torch():
    """One after the other in one process: the first that loads it is named. All public names, too."""
    code = f"""
import importlib, sys
from pipeline import *
assert 'torch' not in sys.modules
for module in {WITHOUT_TORCH}:
    importlib.import_module(module)
    assert 'torch' not in sys.modules, module
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["shm.gate", "workers.message_codec", "pipeline.environments.process"])
def test_module_loads_as_the_first_of_its_process(module):
    """Of each layer one: a circle of imports may show only in the order that begins with it."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_package_is_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in FILES[1:]}
    assert set(setup["options"]["packages"].split()) == packages
    assert all(ROOT.joinpath(*package.split("."), "__init__.py").is_file() for package in packages)


def test_no_two_test_files_have_one_name():
    # pytest imports them by their bare name, and refuses to collect the second. Recorded data it never imports.
    tests, data = ROOT / "tests", ROOT / "tests" / "data"
    names = [path.name for path in ALL_FILES if path.is_relative_to(tests) and not path.is_relative_to(data)]
    assert sorted(names) == sorted(set(names))


def test_the_library_imports_no_command():
    wrong = {}
    for path in FILES:
        relative = path.relative_to(ROOT)
        if relative.parts[:2] != ("pipeline", "commands") and relative.parts[0] != "run.py":
            if found := {module for module in imported_modules(path) if module.startswith("pipeline.commands")}:
                wrong[str(relative)] = sorted(found)
    assert wrong == {}

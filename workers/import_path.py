"""What a user names as `module:name` or `path/to/file.py:name`: a loss of the learner's, an environment, a reward.

A file is loaded under its stem, once per process, with its directory in front of `sys.path`, as if it were run: so the
modules beside it can be imported, and what it defines has the same name in every process.
"""

import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.errors import ImportPathError

_MISSING = object()
_ROOT = Path(__file__).parent.parent
_NOT_THE_USERS = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
    *(f"{_ROOT / package}{os.sep}" for package in ("pipeline", "workers", "shm")),
)


def split_path(path: str, what: str, example: str) -> tuple[str, str]:
    """(module or absolute file, dotted name) of an import path; a file must be there. Nothing is imported.

    `what` and `example` complete the sentence of the ImportPathError, such as `environment` and `my_envs:Search`.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise ImportPathError(
            f"The {what} is {path!r:.200}. It is named as module:name or as path/to/file.py:name. Write for example "
            f"{example}."
        )
    if is_file(place):
        file = Path(place).expanduser().absolute()
        if not file.is_file():
            why = "is a directory" if file.is_dir() else "is not there"
            near = get_close_matches(file.name, [beside.name for beside in file.parent.glob("*.py")], n=1)
            raise ImportPathError(
                f"The {what} {path!r:.200} can't be imported: the file {file} {why}.{_mean(near)} Correct the path."
            )
        return str(file), name
    if ":" in place or not all(part.isidentifier() for part in place.split(".")):
        raise ImportPathError(
            f"The {what} is {path!r:.200}, and {place!r:.200} is no module's name. It is named as module:name or as "
            f"path/to/file.py:name. Write for example {example}."
        )
    return place, name


def is_file(place: str) -> bool:
    """Whether what stands before the colon is a file's path, not a module's name."""
    return place.endswith(".py") or os.sep in place


def find_object(path: str, what: str = "object", example: str = "my_module:name") -> Any:
    """The object at `module:name` or `path/to/file.py:name`; a dotted name goes into classes.

    Raises ImportPathError in one sentence, whatever the user's module raises; `what` and `example` as in `split_path`.
    """
    place, name = split_path(path, what, example)
    try:
        module = _load_file(Path(place)) if is_file(place) else importlib.import_module(place)
        found: Any = module
        for part in name.split("."):
            outer, found = found, getattr(found, part, _MISSING)
            if found is _MISSING:
                break
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # importing runs the user's module, which may raise anything
        raise ImportPathError(f"The {what} {path!r:.200} can't be imported: {_why(failure, place)}") from failure
    if found is _MISSING:
        near = get_close_matches(part, [known for known in dir(outer) if not known.startswith("_")], n=1)
        raise ImportPathError(
            f"The {what} {path!r:.200} can't be imported: {getattr(outer, '__qualname__', outer.__name__)} "
            f"({getattr(module, '__file__', None) or 'built in'}) has no {part!r}.{_mean(near)} Correct the name."
        )
    return found


def search_path() -> list[str]:
    """`sys.path` as another process needs it to import a user's modules: absolute, the current directory last."""
    found = [os.path.abspath(entry) for entry in sys.path]  # "" is the current directory
    return list(dict.fromkeys([*found, os.getcwd()]))


def take_search_path(directories: Sequence[str]) -> None:
    """Search for modules where another process does, in its order, then where this one did already."""
    sys.path[:] = dict.fromkeys([*directories, *sys.path])


def _load_file(file: Path) -> ModuleType:
    directory = str(file.parent)
    if sys.path[:1] != [directory]:
        sys.path[:] = [directory, *(entry for entry in sys.path if entry != directory)]
    importlib.invalidate_caches()  # a file that has just been written may not be seen beside an older listing
    stem = file.stem.replace(".", "_")
    for name in (stem, f"{file.parent.name}_{stem}"):
        known = sys.modules.get(name)
        if known is None:
            return _execute(file, name)
        if _is_from(known, file):
            return known
    raise ImportError(
        f"a module {name} is imported already, from {getattr(known, '__file__', None) or 'Python itself'}; rename the "
        "file"
    )


def _execute(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file; its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses, and modules beside it, look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _is_from(module: ModuleType, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and os.path.exists(origin) and os.path.samefile(origin, file)


def _why(failure: BaseException, place: str) -> str:
    """Why an import failed, where, and what to do."""
    said = " ".join(str(failure).split())[:300]
    if isinstance(failure, SyntaxError):
        said = " ".join((failure.msg or "invalid syntax").split())
        where = f"{failure.filename} line {failure.lineno}" if failure.lineno else f"the source of {place}"
        return f"{where} is no Python: {said}. Correct it."
    if isinstance(failure, ModuleNotFoundError) and failure.name is not None:
        if not is_file(place) and (place == failure.name or place.startswith(failure.name + ".")):
            return (
                f"there is no module {failure.name} in {os.getcwd()}, on Python's search path or among the installed "
                "packages. Correct the name, or name the file, as path/to/file.py:name."
            )
        return f"{failing_line(failure)}it needs the module {failure.name}, which is not installed. Install it."
    if "relative import" in said and is_file(place):
        return f"{failing_line(failure)}{said}; a file of a package is named by its module, as package.module:name."
    said = f"{type(failure).__name__}: {said}" if said else type(failure).__name__
    return f"{failing_line(failure)}{said.removesuffix('.')}. It must import without errors in a process of its own."


def failing_line(failure: BaseException) -> str:
    """`file line n: ` of the innermost line of the user's own that it passed, else of the innermost one."""
    places = [place for place in _places(failure) if place[0] not in (__file__, importlib.__file__)]
    own = own_line(failure)
    if own is None and places:
        own = "{} line {}".format(*places[-1])
    return f"{own}: " if own is not None else ""


def own_line(failure: BaseException) -> str | None:
    """`file line n` of the innermost line that it passed which is neither Headway's nor installed, if there is one."""
    own = [place for place in _places(failure) if not place[0].startswith(_NOT_THE_USERS)]
    return "{} line {}".format(*own[-1]) if own else None


def _places(failure: BaseException) -> list[tuple[str, int | None]]:
    """(file, line) of each frame that the failure passed, outermost first, without those of no file."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(failure.__traceback__)]
    return [place for place in places if not place[0].startswith("<")]


def _mean(near: list[str]) -> str:
    return f" Did you mean {near[0]}?" if near else ""

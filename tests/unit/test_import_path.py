"""What a user names is found by module or by file, under one name in every process; each mistake is one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

from workers.errors import ImportPathError
from workers.import_path import find_object, search_path, split_path, take_search_path

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """A test's modules and search path are its own."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_module_gives_its_names_and_those_inside_its_classes():
    assert find_object("pathlib:Path") is Path
    assert find_object("pathlib:Path.home") == Path.home


def test_file_is_loaded_once_under_its_stem_with_its_siblings(tmp_path, monkeypatch):
    write(tmp_path / "some" / "beside_envs.py", "WORD = 'sibling'\n")
    file = write(
        tmp_path / "some" / "file_envs.py",
        "import beside_envs\n"
        "class Search:\n    word = beside_envs.WORD\n    class Inner: pass\n"
        "def f(): import late_envs\n",
    )
    write(tmp_path / "some" / "late_envs.py", "")
    found = find_object(f"{file}:Search")
    assert (found.__module__, found.__qualname__, found.word) == ("file_envs", "Search", "sibling")
    monkeypatch.chdir(tmp_path)
    assert find_object("some/file_envs.py:Search.Inner") is found.Inner
    assert find_object("file_envs:Search") is found  # by its module's name it is the same one
    find_object(f"{file}:f")()  # what is beside it can also be imported later


def test_file_of_a_name_that_is_taken_is_called_after_its_directory_too(tmp_path):
    for folder in ("first", "second"):
        write(tmp_path / folder / "envs.py", f"class Env: folder = {folder!r}\n")
    first, second = (find_object(f"{tmp_path}/{folder}/envs.py:Env") for folder in ("first", "second"))
    assert (first.folder, first.__module__) == ("first", "envs")
    assert (second.folder, second.__module__) == ("second", "second_envs")
    assert find_object(f"{tmp_path}/second/envs.py:Env") is second
    types = write(tmp_path / "mine" / "types.py", "class Env: pass\n")  # and Python's own module stays
    assert find_object(f"{types}:Env").__module__ == "mine_types"
    assert not hasattr(sys.modules["types"], "Env")


def test_file_has_the_same_names_in_every_process(tmp_path):
    file = write(tmp_path / "far" / "named_envs.py", "class Outer:\n    class Search: pass\n")
    code = "import sys; from workers.import_path import find_object; print(find_object(sys.argv[1]))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, f"{file}:Outer.Search"],
            cwd=cwd,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
        for cwd in (tmp_path, tmp_path / "far")
    }
    assert seen == {"<class 'named_envs.Outer.Search'>\n"}


def test_another_process_searches_where_this_one_does_then_in_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/script", "/lib"])
    assert search_path() == [str(tmp_path), "/script", "/lib"]
    monkeypatch.setattr(sys, "path", ["/script", "/lib"])
    told = search_path()
    assert told == ["/script", "/lib", str(tmp_path)]
    monkeypatch.setattr(sys, "path", ["/own", "/lib"])
    take_search_path(told)
    assert sys.path == ["/script", "/lib", str(tmp_path), "/own"]


BROKEN = {
    "raises.py": "x = 1\n\n1 / 0\n",
    "syntax.py": "x = 1\ndef f(:\n",
    "needs.py": "import no_such_package.inner\n",
    "exits.py": "import sys\nsys.exit('usage: me')\n",
    "deep.py": "import raises\n",
    "nul.py": "x = 1\0\n",
    "own.py": "class Own(BaseException): pass\nraise Own('mine')\n",
    "relative.py": "from .my_envs import Search\n",
    "my_envs.py": "class Search: pass\n",
    "lazy.py": "def __getattr__(name):\n    raise RuntimeError('not ' + name)\n",
}


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("raises.py:X", r"raises.py line 3: ZeroDivisionError: division by zero. It must import without errors"),
        ("deep.py:X", r"raises.py line 3: ZeroDivisionError"),
        ("syntax.py:X", r"syntax.py line 2 is no Python: invalid syntax. Correct it"),
        ("nul.py:X", r"the source of .*/nul.py is no Python: source code .* null bytes. Correct it"),
        ("own.py:X", r"own.py line 2: Own: mine"),
        ("needs.py:X", r"needs.py line 1: it needs the module no_such_package, which is not installed"),
        ("relative.py:X", r"relative.py line 1: attempted relative import .* as package.module:name"),
        ("exits.py:X", r"exits.py line 2: SystemExit: usage: me"),
        ("my_envs.py:Serch", r"my_envs \(.*/my_envs.py\) has no 'Serch'. Did you mean Search\? Correct the name"),
        ("my_envs.py:Search.reset", r"Search \(.*/my_envs.py\) has no 'reset'"),
        ("my_env.py:Search", r"the file .*/my_env.py is not there. Did you mean my_envs.py\? Correct the path"),
        ("./folder.py:Search", r"the file .*/folder.py is a directory"),
        ("lazy.py:X", r"lazy.py line 2: RuntimeError: not X"),
        ("no_such_module:X", r"there is no module no_such_module in .*, or name the file"),
        ("pathlib.inner:X", r"there is no module pathlib.inner"),
        ("my_envs", r"is named as module:name or as path/to/file.py:name. Write for example my_module:name"),
        ("my_envs.py", r"is named as module:name"),
        (":Search", r"is named as module:name"),
        ("my_envs:", r"is named as module:name"),
        ("my_envs:Sea rch", r"is named as module:name"),
        ("my-envs:Search", r"'my-envs' is no module's name"),
        ("a:b:c", r"'a:b' is no module's name"),
        ("folder/my_envs:Search", r"the file .*/folder/my_envs is not there"),
    ],
)
def test_what_can_not_be_imported_is_one_sentence(path, fault, tmp_path, monkeypatch):
    for name, text in BROKEN.items():
        write(tmp_path / name, text)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportPathError, match=fault) as raised:
        find_object(path)
    assert str(raised.value).startswith(("The object " + repr(path), "The object is " + repr(path)))
    assert "\n" not in str(raised.value)


def test_line_is_the_users_where_headway_refuses(tmp_path):
    """As a tool without annotations, whose class is refused while its module is imported."""
    text = "import pipeline as rl\n\n\nclass E(rl.Env):\n    @rl.tool\n    def find(self, x):\n        return x\n"
    file = write(tmp_path / "no_annotation.py", text)
    with pytest.raises(ImportPathError) as refused:
        find_object(f"{file}:E", "environment")
    assert f"{file} line 5: ConfigTypeError: tool E.find has no annotation for 'x'." in str(refused.value)
    assert "`x: str`. It must import without errors" in str(refused.value)


def test_file_that_failed_is_tried_anew(tmp_path):
    file = write(tmp_path / "once_broken.py", "1 / 0\n")
    with pytest.raises(ImportPathError, match="ZeroDivisionError"):
        find_object(f"{file}:X")
    write(file, "class X: pass  # and longer than before\n")
    assert find_object(f"{file}:X").__name__ == "X"


def test_path_is_split_without_importing(tmp_path, monkeypatch):
    write(tmp_path / "raises.py", "1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert split_path("raises.py:X", "environment", "a:B") == (str(tmp_path / "raises.py"), "X")
    assert split_path("no_such.module:X.Y", "environment", "a:B") == ("no_such.module", "X.Y")
    with pytest.raises(ImportPathError, match="The environment is 'X'. .* Write for example a:B."):
        split_path("X", "environment", "a:B")

"""What test_probe.py has a process of its own import: environments and rows that behave, and others."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import pipeline as rl


class Search(rl.Env):
    recovery = "stateless"

    def __init__(self, *, size=2, word="row"):
        print("made in", os.getpid())
        sys.stderr.write("with torch\n" if "torch" in sys.modules else "without torch\n")

    @classmethod
    def rows(cls, seed, /, size=2, **arguments):
        return ({"word": arguments.get("word"), "seed": seed, "pair": (index, True)} for index in range(size))

    @rl.tool
    async def search(self, query: str) -> str:
        """Search."""

    def reset(self, row):
        return "?"

    def reward(self, traj, row):
        return 0.0

    async def close(self):
        await asyncio.sleep(0)
        print("closed")


class Raises(Search):
    def __init__(self, where="init"):
        self.where = where
        if where == "init":
            raise KeyError("no\nkey")

    @classmethod
    def rows(cls, seed, /, where):
        if where == "rows":
            raise SystemExit("no rows here")
        return None

    def close(self):
        raise RuntimeError("closing fails")


class Half(Search):
    def __init__(self):
        raise rl.ConfigError("half of a pair: \ud83d")


class Stays(Search):
    """Leaves a process and a thread behind, and reads from stdin."""

    def __init__(self, pid_file):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        with open(pid_file, "w") as file:
            file.write(str(child.pid))
        threading.Thread(target=time.sleep, args=(3600,)).start()
        assert sys.stdin.read() == ""

    @classmethod
    def rows(cls, seed, /, pid_file):
        return None


class Hangs(Search):
    def __init__(self, pid_file):
        with open(pid_file, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)


class Dies(Search):
    def __init__(self):
        os.abort()


def rows_of_a_set():
    return [{"prompt": word} for word in {f"word{number}" for number in range(50)}]


def rows_of_two():
    os.fork()
    return [{"prompt": "a"}]


class Own(BaseException):
    pass


def raise_GeneratorExit():  # noqa: N802
    raise GeneratorExit


def raise_Own():  # noqa: N802
    raise Own


def rows():
    return [{"prompt": "a", "answer": 7}, {"prompt": "b", "answer": None}]


NOT_A_FUNCTION = 3

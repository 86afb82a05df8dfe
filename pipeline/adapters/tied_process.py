"""Programs that the kernel ends with the process that started them, whatever ends that."""

import os
import sys

# Run by the interpreter without its site-packages (15 ms). Its arguments: the starter's process id, then the program.
# The tie lasts over exec. 1 is PR_SET_PDEATHSIG, 9 SIGKILL.
TIE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} can't be run: {error}")
"""


def tied(argv: list[str]) -> list[str]:
    """The command that runs `argv` tied to this process. To be started from the main thread: the kernel ties a child to
    the thread that made it.
    """
    return [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), *argv]

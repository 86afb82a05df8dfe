"""The process of `probe.py`: it imports users' code, and answers with plain values.

`python -P -m pipeline.user_code.probe_process PARENT FILE`: the question comes by stdin, msgpack; the answer, or the
error in one sentence, goes to the descriptor FILE. Standard output is the parent's stderr.
"""

import os
import sys
from typing import Any

import msgpack

from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.user_code.description import describe, rows_at
from pipeline.user_code.load import load_env_class
from workers.import_path import take_search_path
from workers.worker_main import become_worker


def answer_to(question: dict[str, Any]) -> Any:
    """What it asks for; raises ConfigError or ConfigTypeError."""
    take_search_path(question["sys_path"])
    if "rows" in question:
        return rows_at(question["rows"])
    return {
        name: describe(load_env_class(path), arguments, seed)
        for name, (path, arguments, seed) in question["environments"].items()
    }


def main() -> None:
    """Ends the process."""
    parent, file, own = int(sys.argv[1]), int(sys.argv[2]), os.getpid()
    become_worker(parent)
    question = msgpack.unpackb(sys.stdin.buffer.read(), strict_map_key=False)
    # Users' code finds an empty stdin: what it asks there is answered by nobody.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        answer = {"found": answer_to(question)}
    except (ConfigError, ConfigTypeError) as error:
        # Half a surrogate pair, which no message can carry, becomes ?.
        said = str(error).encode("utf-8", "replace").decode("utf-8")
        answer = {"error": said, "kind": type(error).__name__}
    if os.getpid() != own:  # users' code has forked, and let its child come back here
        os._exit(1)
    data = memoryview(msgpack.packb(answer))
    while data:
        data = data[os.write(file, data) :]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that users' code has started, or its exit handlers, need not end


if __name__ == "__main__":
    main()

"""What users' code raises, as a message tells it; its trace goes to a log."""

LOGGER = "headway.environment"  # gets the traces


def failure_text(failure: BaseException) -> str:
    """`Type: message` on one line, cut at 500 characters. A group of one, as a TaskGroup raises it, is that one."""
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    try:
        text = sendable(" ".join(str(failure).split()))
    except Exception:  # its class's own code
        text = ""
    text = f"{type(failure).__name__}: {text}" if text else type(failure).__name__
    return text if len(text) <= 500 else text[:497] + "..."


def sendable(text: str) -> str:
    """`text` with ? for what no message can carry: halves of a surrogate pair, which file names and JSON may hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

"""What the endpoint says no with: OpenAI's error object, so that clients show its sentence."""

from typing import Any

from shm.errors import HeadwayError

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, TOO_LARGE, UNAVAILABLE = 400, 401, 403, 404, 409, 413, 503

# What a prompt or turn gets that no budget is left for; agents know the code from OpenAI.
NO_ROOM = "context_length_exceeded"


class Refusal(HeadwayError):
    """One request is refused with an HTTP status; the rollout goes on. param: the field that is meant."""

    def __init__(self, status: int, sentence: str, *, code: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": self.param}}


def refuse(param: str, sentence: str, code: str = "invalid_value") -> Refusal:
    """A field of a request has a value that can't be."""
    return Refusal(BAD_REQUEST, sentence, code=code, param=param)

"""Which fields a user says that rows have: prompt, answer, id; and what is wrong with a row that lacks them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.bad_rows import BadRows
from pipeline.env import as_messages, is_empty_prompt
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.wording import shown, suggestion

_SHOWN_FIELDS = 8  # of those that a row has instead


@dataclass(frozen=True, slots=True)
class RowFields:
    """Names of fields, None for those that nothing is asked of. Raises ConfigError or ConfigTypeError.

    The prompt is text, or a list of messages, with more than white space in it; the answer is there, of any value (null
    too); the id is text or a whole number, each once.
    """

    prompt: str | None = None
    answer: str | None = None
    id: str | None = None
    allow_empty_prompts: bool = False
    _ids: dict[str | int, int | str] = field(default_factory=dict, init=False, repr=False)  # id -> where it stood first

    def __post_init__(self) -> None:
        for what in ("prompt", "answer", "id"):
            name = getattr(self, what)
            if name is not None and (not isinstance(name, str) or not name):
                raise ConfigTypeError(f"{what}_field is {shown(name)}; name a field of the rows, or leave it out.")
        if not isinstance(self.allow_empty_prompts, bool):
            raise ConfigTypeError(f"allow_empty_prompts is {shown(self.allow_empty_prompts)}; write True or False.")
        if self.allow_empty_prompts and self.prompt is None:
            raise ConfigError(
                "allow_empty_prompts has no effect without a prompt_field, as no field is known to be the prompt; name "
                "it, or leave allow_empty_prompts out."
            )

    def check_columns(self, source: str, names: Iterable[str]) -> None:
        """Raise ConfigError for a field that a file with columns does not have: once, and not for each of its rows."""
        names = list(names)
        for what in ("prompt", "answer", "id"):
            name = getattr(self, what)
            if name is not None and name not in names:
                raise ConfigError(
                    f"{source} has no column {name!r}, the {what} field; its columns are {_listed(names)}."
                    f"{suggestion(name, names)} Name the column that is the {what}."
                )

    def check(self, place: int | str, row: dict[str, Any], bad: BadRows) -> None:
        """Tell `bad` what is wrong with the row, and give it its "id"."""
        if self.prompt is not None:
            self._check_prompt(place, row, bad)
        if self.answer is not None and self.answer not in row:
            bad.add(place, *_lacks(row, "answer", self.answer))
        if self.id is not None:
            self._check_id(place, row, bad)

    def _check_prompt(self, place: int | str, row: dict[str, Any], bad: BadRows) -> None:
        name = self.prompt
        if name not in row:
            bad.add(place, *_lacks(row, "prompt", name))
            return
        prompt = row[name]
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            bad.add(
                place,
                f"has {prompt!r:.80} as its prompt ({name!r})",
                'A prompt is text, or a list of messages {"role": …, "content": text} that is not empty.',
            )
        elif not self.allow_empty_prompts and is_empty_prompt(prompt):
            bad.add(
                place,
                f"has an empty prompt ({name!r} is {prompt!r:.60})",
                "Write the prompt, or say with allow_empty_prompts that it may be empty.",
            )

    def _check_id(self, place: int | str, row: dict[str, Any], bad: BadRows) -> None:
        name = self.id
        if name not in row:
            bad.add(place, *_lacks(row, "id", name))
            return
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            bad.add(place, f"has {value!r:.80} as its id ({name!r})", "An id is text or a whole number.")
            return
        first = self._ids.setdefault(value, place)
        if first != place:
            bad.add(
                place,
                f"has the id {value!r:.80} of {bad.unit} {first}",
                "Give every row an id of its own, or name no id field.",
            )
        if row.setdefault("id", value) != value:
            bad.add(
                place,
                f'has {row["id"]!r:.80} as its "id", but the id field {name!r} holds {value!r:.80}',
                'A row\'s id goes into its field "id": rename that one, or name it as the id field.',
            )


def _lacks(row: dict[str, Any], what: str, name: str) -> tuple[str, str, str]:
    advice = f"Add the {what}, or name the field that holds it with --{what}-field ({what}_field in Python)."
    return f"has no field {name!r}, the {what}", advice, f" (its fields: {_listed(row)})"


def _listed(names: Iterable[str]) -> str:
    names = [f"{name!r:.40}" for name in names]
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    return (", ".join(names[:_SHOWN_FIELDS]) or "none") + more


def _is_conversation(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    try:
        as_messages(prompt, "the prompt")
    except ConfigTypeError:
        return False
    return True

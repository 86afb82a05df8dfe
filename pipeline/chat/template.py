"""A model's own chat template: found in its directory, and rendered as transformers renders it."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from pipeline.chat.json_files import read_json_object
from pipeline.chat.sandbox import MAX_TEXT, ChatSandbox
from pipeline.errors import ConfigError, TemplateError

# The special tokens that a template may write by name.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", *TOKEN_NAMES)


class ChatTemplate:
    """The default template and the one for conversations with tools, which is often the same.

    variables: what the template may read beside the conversation: special tokens and the user's options. The date that
    `strftime_now` gives is fixed when the template is loaded: one that changed in mid-run would rewrite every prompt.
    """

    def __init__(self, default: str, with_tools: str, variables: Mapping[str, Any], place: str) -> None:
        self.source = with_tools
        self._place = place
        self._variables = dict(variables)
        self._sandbox = ChatSandbox()
        now = datetime.datetime.now()
        self._sandbox.globals["strftime_now"] = lambda form: now.strftime(form)
        self._default = self._compile(default)
        self._with_tools = self._default if with_tools == default else self._compile(with_tools)
        parsed = [self._sandbox.parse(source) for source in {default, with_tools}]
        self.reads = frozenset().union(*map(jinja2.meta.find_undeclared_variables, parsed))  # names of variables

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it, fails, or does not end."""
        template = self._with_tools if tools else self._default
        self._sandbox.refill()
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            ):
                parts.append(part)
                length += len(part)
                if length > MAX_TEXT:
                    raise TemplateError(f"The chat template of {self._place} wrote more than {MAX_TEXT:,} characters.")
        except TemplateError:
            raise
        except MemoryError:
            raise TemplateError(f"The chat template of {self._place} needs more memory than there is.") from None
        except Exception as error:  # a template may fail in any way, as code does
            raise TemplateError(
                f"The chat template of {self._place} refused a conversation: {_sentence(error)}."
            ) from None
        return "".join(parts)

    def _compile(self, source: str) -> jinja2.Template:
        try:
            return self._sandbox.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, TypeError) as error:
            raise ConfigError(
                f"The chat template of {self._place} can't be compiled: {_sentence(error)}. Correct it."
            ) from None


def read_template(directory: Path, options: Mapping[str, Any]) -> ChatTemplate:
    """The template of a model directory: its *.jinja files if it has any, else what tokenizer_config.json has.

    options: variables for it, such as `enable_thinking`. Raises ConfigError: no template, one that does not compile, or
    an option that the template never reads.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    sources = _template_files(directory) or _named_templates(config.get("chat_template"), directory)
    if not sources:
        raise ConfigError(
            f"{directory} has no chat template. Without one nobody knows how to write a conversation for this model. "
            'Add chat_template.jinja (or the key "chat_template" of tokenizer_config.json) from its instruct version.'
        )
    default = sources.get("default") or next(iter(sources.values()))
    with_tools = sources.get("tool_use", default)
    template = ChatTemplate(default, with_tools, special_tokens(directory) | dict(options), str(directory))
    for name in options:
        if name in RESERVED or name not in template.reads:
            why = "it is set by Headway" if name in RESERVED else "the template never reads it"
            raise ConfigError(
                f"The chat template option {name!r} has no effect on the template of {directory}: {why}. Leave it out."
            )
    return template


def special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token` and the like, by name, where the directory sets them."""
    config = read_json_object(directory / "tokenizer_config.json")
    mapped = read_json_object(directory / "special_tokens_map.json")
    found = {}
    for name in TOKEN_NAMES:
        value = config.get(name, mapped.get(name))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_files(directory: Path) -> dict[str, str]:
    found = {}
    for name, path in (
        ("default", directory / "chat_template.jinja"),
        *((path.stem, path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))),
    ):
        try:
            found[name] = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read ({error}). Fetch the model directory again.") from None
    return found


def _named_templates(value: Any, directory: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in value
    ):
        return {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return dict(value)
    raise ConfigError(
        f'The "chat_template" in {directory / "tokenizer_config.json"} is {value!r:.100}. It is a text, or a list of '
        '{"name", "template"}. Correct it.'
    )


def _sentence(error: BaseException) -> str:
    """One line about a template's error, without the final stop."""
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = text if len(text) <= 300 else text[:297] + "..."
    return text.rstrip(".") + line

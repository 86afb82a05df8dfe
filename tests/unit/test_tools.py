"""What `@tool` makes of a typed function, and what becomes of a model's arguments."""

from typing import Any, Literal

import pytest

from pipeline.env import Env, tool
from pipeline.errors import ConfigTypeError
from pipeline.user_code.failures import failure_text
from pipeline.user_code.tool_schema import ArgumentError
from pipeline.user_code.tools import spec_of, tools_of


@tool
async def search(query: str, limit: int = 5, exact: bool | None = None) -> str:
    """Search the
    library.

    Args:
        query: what to look for,
            in plain words
        limit (int): most results

    Returns:
        query: not a parameter's text
    """
    return f"{query} {limit} {exact}"


def arguments(annotation: Any, value: Any) -> Any:
    def function(x):
        return x

    function.__annotations__ = {"x": annotation}
    return spec_of(tool(function)).arguments({"x": value})["x"]


def test_schema_comes_from_annotations_defaults_and_docstring():
    assert spec_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the library.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in plain words"},
                    "limit": {"type": "integer", "description": "most results"},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_tool_stays_the_function_it_was():
    @tool
    def double(x: int) -> int:
        return 2 * x

    assert double(4) == 8 and double.__name__ == "double"


def test_nested_types_have_nested_schemas():
    @tool
    def plot(points: list[dict[str, float]], style: Literal["line", "bar"], extra: Any = None):
        """Plot."""

    assert spec_of(plot).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "items": {"type": "object", "additionalProperties": {"type": "number"}},
            },
            "style": {"enum": ["line", "bar"]},
            "extra": {},
        },
        "required": ["points", "style"],
    }


@pytest.mark.parametrize(
    ("annotation", "written", "meant"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (int, " -7 ", -7),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (float, "2.5", 2.5),
        (bool, "True", True),
        (str, 3, "3"),
        (str, True, "true"),
        (list[int], "[1, 2]", [1, 2]),
        (list, ["a", 1], ["a", 1]),
        (dict[str, int], '{"a": "1"}', {"a": 1}),
        (Literal["low", 2], "2", 2),
        (int | None, None, None),
        (int | str, "3", "3"),  # a value that fits stays as it is
        (int | bool, True, True),
        (float | None, "1e3", 1000.0),
    ],
)
def test_arguments_with_one_plain_reading_are_converted(annotation, written, meant):
    found = arguments(annotation, written)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    ("annotation", "written", "rule"),
    [
        (int, "three", "must be an integer"),
        (int, 3.5, "must be an integer"),
        (int, True, "must be an integer"),
        (int, None, "must be an integer"),
        (int, "9" * 5000, "must be an integer"),
        (float, float("nan"), "must be a finite number"),
        (float, "inf", "must be a finite number"),
        (float, 10**400, "must be a finite number"),
        (float, False, "must be a finite number"),
        (bool, 1, "must be true or false"),
        (str, ["a"], "must be a string"),
        (list[int], "1, 2", "must be a list"),
        (list[int], [1, "x"], "must be an integer"),
        (dict, [1], "must be an object"),
        (Literal["low", "high"], "middle", 'must be one of "low", "high"'),
        (int | None, "x", "must be an integer or null"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_rule(annotation, written, rule):
    with pytest.raises(ArgumentError, match=rule) as refused:
        arguments(annotation, written)
    assert "'x'" in str(refused.value) and len(str(refused.value)) < 250


def test_missing_unknown_and_shapeless_arguments_are_named():
    spec = spec_of(search)
    assert spec.arguments({"query": "a"}) == {"query": "a"}
    with pytest.raises(ArgumentError, match="search needs the argument 'query'; it must be a string"):
        spec.arguments({"limit": 3})
    with pytest.raises(ArgumentError, match="no argument 'qery'; its arguments: query, limit, exact"):
        spec.arguments({"qery": "a"})
    with pytest.raises(ArgumentError, match="must be an object"):
        spec.arguments("query")


def test_parameters_without_usable_annotation_are_refused_where_the_tool_is_written():
    with pytest.raises(ConfigTypeError, match="no annotation for 'x'"):

        @tool
        def untyped(x):
            pass

    with pytest.raises(ConfigTypeError, match=r"parameter 'when' of tool .*set"):

        @tool
        def typed_oddly(when: set[int]):
            pass

    with pytest.raises(ConfigTypeError, match=r"\*\*options"):

        @tool
        def open_ended(**options: int):
            pass

    with pytest.raises(ConfigTypeError, match="cannot be resolved: name 'Nowhere'"):

        @tool
        def forward(x: "Nowhere"):  # noqa: F821
            pass

    with pytest.raises(ConfigTypeError, match="directly above the def"):
        tool(len)


class Base(Env):
    @tool
    def first(self) -> str:
        return "base first"

    @tool
    def second(self) -> str:
        return "base second"


class Derived(Base):
    @tool
    def second(self) -> str:
        return "derived second"

    def first(self) -> str:  # no tool any more
        return "hidden"


def test_tools_are_the_decorated_methods_and_follow_inheritance():
    assert {name: function() for name, (_, function) in tools_of(Base()).items()} == {
        "first": "base first",
        "second": "base second",
    }
    assert {name: function() for name, (_, function) in tools_of(Derived()).items()} == {"second": "derived second"}


def test_a_tools_list_names_exactly_the_tools():
    class Listed(Base):
        tools = [search, Base.second]

    table = tools_of(Listed())
    assert list(table) == ["search", "second"] and table["second"][1]() == "base second"
    env = Base()
    env.tools = [env.first]
    assert [function() for _, function in tools_of(env).values()] == ["base first"]
    env.tools = []
    assert tools_of(env) == {}


def test_a_tools_list_with_something_else_in_it_is_refused():
    env = Base()
    env.tools = [len]
    with pytest.raises(ConfigTypeError, match="built-in function len.*no tool"):
        tools_of(env)
    env.tools = [search, search]
    with pytest.raises(ConfigTypeError, match="two tools named 'search'"):
        tools_of(env)


def test_a_group_of_one_failure_is_told_as_that_one():
    one = ExceptionGroup("unhandled errors in a TaskGroup", [ExceptionGroup("inner", [KeyError("answer")])])
    assert failure_text(one) == "KeyError: 'answer'"
    several = ExceptionGroup("two", [KeyError("a"), KeyError("b")])
    assert failure_text(several) == "ExceptionGroup: two (2 sub-exceptions)"

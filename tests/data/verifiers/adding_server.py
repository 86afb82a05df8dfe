"""The tool server of `adding`; verifiers runs it as `python -m adding_server`."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "adder"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


if __name__ == "__main__":
    Adder.run()

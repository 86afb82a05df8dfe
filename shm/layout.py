"""Where each tensor of a model lies in a flat buffer: names, shapes, offsets. A leaf: no torch.

The learner's master weights, its gradients and every weight slot share one layout, so publishing is one copy.
Matrices come first, one-dimensional tensors (norms, biases) after them: the two differ in weight decay, and each kind
is one slice.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from shm.errors import WeightsError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}  # the dtypes a weight slot may have


class Entry(NamedTuple):
    """One tensor: `shape` row-major from element `offset` of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int  # in elements, whatever their size: a float32 master and a bfloat16 slot share it

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The table of a flat buffer of `num_elements`. Raises WeightsError unless it is in order and without overlap.

    Tied weights have one entry. Gaps (for alignment) are allowed; whoever makes the buffer fills them with zeros.
    """

    entries: tuple[Entry, ...]
    num_elements: int

    def __post_init__(self) -> None:
        end, vectors_began, names = 0, False, set()
        for entry in self.entries:
            if not entry.shape or min(entry.shape) < 1:
                raise WeightsError(
                    f"Tensor {entry.name!r} has shape {entry.shape}; every dimension must be at least 1."
                )
            if entry.name in names:
                raise WeightsError(
                    f"Tensor {entry.name!r} is in the layout twice; name each tensor, tied ones too, once."
                )
            if entry.offset < end:
                raise WeightsError(
                    f"Tensor {entry.name!r} begins at element {entry.offset}, before the end ({end}) of the tensor "
                    "in front of it; order the layout by offset, without overlap."
                )
            if len(entry.shape) > 1 and vectors_began:
                raise WeightsError(
                    f"Matrix {entry.name!r} {entry.shape} stands after a one-dimensional tensor; "
                    "put all matrices first."
                )
            vectors_began = vectors_began or len(entry.shape) == 1
            names.add(entry.name)
            end = entry.offset + entry.num_elements
        if self.num_elements < end:
            raise WeightsError(
                f"The layout needs {end} elements, but num_elements is {self.num_elements}; make it larger."
            )

    @property
    def num_matrix_elements(self) -> int:
        """The flat buffer's first elements, up to here, hold all matrices; the rest holds the vectors."""
        for entry in self.entries:
            if len(entry.shape) == 1:
                return entry.offset
        return self.num_elements

    def num_bytes(self, dtype: str) -> int:
        """Size of a buffer of this layout in `dtype` ("float32", "bfloat16"); for who makes blocks without torch."""
        if dtype not in ELEMENT_BYTES:
            raise WeightsError(f"Weights in {dtype!r} are not supported; use one of {sorted(ELEMENT_BYTES)}.")
        return self.num_elements * ELEMENT_BYTES[dtype]

    def to_fields(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "entries": [[entry.name, list(entry.shape), entry.offset] for entry in self.entries],
            "num_elements": self.num_elements,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "WeightLayout":
        """Inverse of `to_fields`; WeightsError when the values are no layout."""
        try:
            entries = tuple(
                Entry(str(name), tuple(int(size) for size in shape), int(offset))
                for name, shape, offset in fields["entries"]
            )
            num_elements = int(fields["num_elements"])
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"Not a weight layout ({type(error).__name__}: {error}); it needs `entries` of [name, shape, offset] "
                "and `num_elements`."
            ) from error
        return cls(entries, num_elements)

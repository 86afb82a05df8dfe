"""mix_rows: rows of several datasets, one per environment, that are trained in given shares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from pipeline.config_checks import is_finite_number
from pipeline.data.row_order import RowOrder
from pipeline.dataset import ENVIRONMENT_KEY
from pipeline.errors import ConfigError, ConfigTypeError
from pipeline.wording import shown, suggestion


class MixedRows(Sequence):
    """The rows of all parts, one part after the other. `names`, `sizes` and `weights` are the parts'."""

    def __init__(self, parts: Mapping[str, Sequence[dict[str, Any]]], weights: Mapping[str, float]) -> None:
        """parts: rows that hold their part's name already; weights: one for each. `mix_rows` checks both."""
        self.names = tuple(parts)
        self.sizes = tuple(len(rows) for rows in parts.values())
        self.weights = tuple(weights[name] for name in parts)
        self._rows = [row for rows in parts.values() for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._rows[index]

    def __repr__(self) -> str:
        parts = zip(self.names, self.sizes, self.weights, strict=True)
        return f"MixedRows({', '.join(f'{name}: {size} rows, weight {weight:g}' for name, size, weight in parts)})"

    def parts(self) -> dict[str, list[dict[str, Any]]]:
        """The rows by name, in order."""
        by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        for row in self._rows:
            by_name[row[ENVIRONMENT_KEY]].append(row)
        return by_name

    def kept(self, is_kept: Callable[[dict[str, Any]], bool]) -> "MixedRows":
        """The mix of the rows that `is_kept`. Raises ConfigError when a part has none left."""
        parts = {name: [row for row in rows if is_kept(row)] for name, rows in self.parts().items()}
        for name, rows in parts.items():
            if not rows:
                raise ConfigError(
                    f"All rows of {name!r} are held out, so nothing of it is left to train; give it more rows, or "
                    "leave it out of the mix."
                )
        return MixedRows(parts, dict(zip(self.names, self.weights, strict=True)))


def mix_rows(parts: Mapping[str, Sequence[dict[str, Any]]], *, weights: Mapping[str, float] | None = None) -> MixedRows:
    """Rows for environments of several names (`RolloutEngine(env={name: …})`): each gets the key "environment" with its
    part's name.

    Groups are admitted of each part in proportion to its weight (default 1), to within one group at any time, and each
    part goes round on its own, whatever its number of rows. Raises ConfigError or ConfigTypeError.
    """
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) and name for name in parts):
        raise ConfigTypeError(f"parts is {shown(parts)}; give a dict from environments' names to their rows.")
    if not parts:
        raise ConfigError("parts is empty; give rows of at least one environment.")
    weights = {} if weights is None else weights
    if not isinstance(weights, Mapping):
        raise ConfigTypeError(f"weights is {shown(weights)}; give a dict from environments' names to numbers.")
    for name, weight in weights.items():
        if name not in parts:
            raise ConfigError(
                f"weights names {name!r}, of which there are no rows.{suggestion(str(name), parts)} The parts are "
                f"{', '.join(parts)}."
            )
        if not is_finite_number(weight) or not weight > 0:
            raise ConfigError(
                f"The weight of {name!r} is {shown(weight)}; it is a share of the groups, so it must be a finite "
                "number above 0. Leave a part out that is not to be trained."
            )
    return MixedRows(
        {name: _named(name, rows) for name, rows in parts.items()}, {name: weights.get(name, 1.0) for name in parts}
    )


def _named(name: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the rows, with their part's name."""
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise ConfigTypeError(f"The rows of {name!r} are {type(rows).__name__}; give a list of dicts.")
    if not rows:
        raise ConfigError(f"{name!r} has no rows; give at least one, or leave it out of the mix.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigTypeError(f"Row {index} of {name!r} is {shown(row)}; every row is a dict of plain values.")
        found = row.get(ENVIRONMENT_KEY, name)
        if found != name:
            raise ConfigError(
                f"Row {index} of {name!r} has {shown(found)} as its {ENVIRONMENT_KEY!r}; in a mix that key names the "
                "row's environment: rename the field."
            )
    return [row | {ENVIRONMENT_KEY: name} for row in rows]


def keep_rows(
    rows: Sequence[dict[str, Any]], is_kept: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]] | MixedRows:
    """Those that `is_kept`, in order: of a mix a mix."""
    return rows.kept(is_kept) if isinstance(rows, MixedRows) else [row for row in rows if is_kept(row)]


def order_of(rows: Sequence[dict[str, Any]], *, seed: int | None) -> RowOrder:
    """In which order the rows are admitted; seed: shuffled by it."""
    if isinstance(rows, MixedRows):
        return RowOrder(rows.sizes, weights=rows.weights, seed=seed)
    return RowOrder([len(rows)], seed=seed)

"""Update of the packed weights of a model in place.

An update is checked as a whole before anything is copied: a name that the model does not have, another shape
or another format is refused, and the model keeps all its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from draftproof.errors import LoadError, nearest
from draftproof.models.weights.packed_tree import check_alike, copy_into
from draftproof.models.weights.tensor import FLOAT_NAMES, FloatWeight, WeightTensor

if TYPE_CHECKING:
    from draftproof.models.weight_formats import PackedEntry

_FLOAT_FORMATS = frozenset(FLOAT_NAMES.values())


@dataclass(frozen=True, slots=True)
class WeightForms:
    """Forms in which the weights of a model are given to an update."""

    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    groups: Sequence[frozenset[str]]  # names whose weights are packed together and replaced together

    @classmethod
    def of_entries(cls, entries: Sequence[PackedEntry]) -> WeightForms:
        """Return the forms of weights that are packed as `entries`."""
        shapes = {name: shape for entry in entries for name, shape in entry.shapes.items()}
        formats = {name: one for entry in entries for name, one in entry.formats.items()}
        groups = [frozenset(entry.formats) for entry in entries if not _has_floats_only(entry)]
        return cls(shapes, formats, groups)


def _has_floats_only(entry: PackedEntry) -> bool:
    """Return whether a part of an entry can be replaced."""
    return _FLOAT_FORMATS.issuperset(entry.formats.values())


def check_update(forms: WeightForms, weights: Mapping[str, WeightTensor]) -> None:
    """Raise LoadError unless every weight has a place in the model, of the same shape and format."""
    shapes, formats = forms.shapes, forms.formats
    for name, weight in weights.items():
        if name not in shapes:
            hint = nearest(name, shapes, "names are those of the model's checkpoint")
            raise LoadError(f"the model has no weight {name!r}: {hint}")
        if weight.shape != shapes[name]:
            raise LoadError(f"{name} is {list(weight.shape)} but should be {list(shapes[name])}")
        if weight.format != formats[name] and not {weight.format, formats[name]} <= _FLOAT_FORMATS:
            raise LoadError(
                f"{name} is in the format {formats[name]} and the new one in {weight.format}: weights that "
                "were read quantised are updated from files in the same format"
            )
    for group in forms.groups:
        missing = group - weights.keys()
        if missing and len(missing) < len(group):
            raise LoadError(
                f"{min(missing)} is missing: it is packed with {min(group & weights.keys())}, "
                f"and a part of packed {formats[min(missing)]} cannot be replaced"
            )


def apply_update(entries: Sequence[PackedEntry], weights: Mapping[str, WeightTensor]) -> None:
    """Pack new weights, which `check_update` has passed, and copy them into the storage of the old ones."""
    for entry in entries:
        given = entry.formats.keys() & weights.keys()
        if not given:
            continue
        new = {name: weights[name] if name in given else _filled(entry, name, 0.0) for name in entry.formats}
        packed, mask = entry.pack(new), None
        check_alike(entry.packed, packed, next(iter(entry.formats)))
        if len(given) < len(entry.formats):
            ones = {name: _filled(entry, name, 1.0 if name in given else 0.0) for name in entry.formats}
            zeros = {name: _filled(entry, name, 0.0) for name in entry.formats}
            mask = entry.pack(ones), entry.pack(zeros)  # they differ where the given weights are packed
        copy_into(entry.packed, packed, mask)


def _filled(entry: PackedEntry, name: str, value: float) -> WeightTensor:
    dtypes: dict[str, Any] = {text: dtype for dtype, text in FLOAT_NAMES.items()}
    return FloatWeight(torch.full(entry.shapes[name], value, dtype=dtypes[entry.formats[name]]))

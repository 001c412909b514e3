"""Checks that are made from annotations, however numpy spells those of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from leftfold.events.shapes import _check_of


class _Alias:
    """What `NDArray` is from numpy 2.5 and Python 3.12 on: a name that holds the array's type as its value."""

    __value__ = np.ndarray[Any, np.dtype[Any]]


@pytest.mark.parametrize(
    "array", [npt.NDArray[np.int32], np.ndarray[Any, np.dtype[np.int32]], GenericAlias(_Alias, (np.int32,))]  # type: ignore[arg-type]
)
def test_token_ids_are_a_list_or_an_array_however_the_array_is_named(array: Any) -> None:
    check = _check_of(Sequence[int] | array)
    assert check is not None
    assert check([1, 2]) and check(np.array([1, 2], np.int32))
    assert not check("12") and not check([1.5])

"""What every refusal must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rankwise as rw


def check_sentence(call: Callable[[], Any]) -> str:
    """The message of the RankwiseError that `call` must raise: one line, not empty."""
    with pytest.raises(rw.RankwiseError) as caught:
        call()
    message = str(caught.value)
    assert message.strip()
    assert "\n" not in message
    return message

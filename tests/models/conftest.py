"""What the tests of models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from turnstile.models.teams import leave_team


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
    leave_team()

"""Parameters that a model got after it was offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.unmanaged_params import UnmanagedParams


def test_over_ranks_a_late_parameter_is_refused_with_and_without_an_optimizer() -> None:
    """Nobody would average its gradients, so that the ranks would part without an error."""
    model = nn.Sequential(nn.Linear(4, 4))
    late = UnmanagedParams(model)
    late.refuse_untrained(num_ranks=2)
    model(torch.ones(4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late.refuse_untrained()
    with pytest.raises(ConfigError, match=r"0\.weight.*ranks would part.*before infinity"):
        late.refuse_untrained(num_ranks=2)
    optimizer.zero_grad()
    late.refuse_untrained(num_ranks=2)

"""Parameters that a model got after it was offloaded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.modules.handles.unmanaged_params import UnmanagedParams


def test_over_ranks_a_late_parameter_is_refused_with_and_without_an_optimizer() -> None:
    """Nobody would average its gradients, so that the ranks would part without an error."""
    model = nn.Sequential(nn.Linear(4, 4))
    late = UnmanagedParams(model)
    late.refuse_untrained(num_ranks=2)
    model(torch.ones(4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late.refuse_untrained()
    with pytest.raises(ConfigError, match=r"0\.weight.*ranks would diverge.*before infinity"):
        late.refuse_untrained(num_ranks=2)
    optimizer.zero_grad()
    late.refuse_untrained(num_ranks=2)


OPTIMIZERS = [
    *(
        partial(kind, lr=0.1, **how)
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
        for how in ({"fused": True}, {"foreach": True}, {"foreach": False})
    ),
    partial(torch.optim.Adafactor, lr=0.1),
    partial(torch.optim.LBFGS, lr=0.1),
    partial(torch.optim.AdamW, lr=0.0, fused=True),
]


@pytest.mark.parametrize(
    "make", OPTIMIZERS, ids=lambda make: f"{make.func.__name__}{make.keywords}"
)
def test_any_optimizer_of_torch_trains_a_late_parameter(
    make: partial[torch.optim.Optimizer],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    late, optimizer = UnmanagedParams(model), make(model.parameters())
    for step in range(4):
        if step == 2:  # A program may make another optimizer on its way.
            optimizer = make(model.parameters())
        loss = model(torch.ones(4)).sum()
        loss.backward()
        late.refuse_untrained()
        optimizer.step(lambda loss=loss: loss)
        if step % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [True, False])
def test_a_late_parameter_whose_optimizer_makes_no_step_is_refused(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    late = UnmanagedParams(model)
    steps, idle = (torch.optim.AdamW(part.parameters(), fused=fused) for part in model)
    for _ in range(2):
        model(torch.ones(4)).sum().backward()
        late.refuse_untrained()
        steps.step()
        idle.step()
    model(torch.ones(4)).sum().backward()
    late.refuse_untrained()
    steps.step()
    with pytest.raises(ConfigError, match=r"'1\.weight', '1\.bias' came.*no optimizer"):
        late.refuse_untrained()
    idle.step()
    steps.step()
    late.refuse_untrained()

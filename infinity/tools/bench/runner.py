"""Runs a group: contenders alternate, and another one begins in each round."""

from __future__ import annotations

from collections.abc import Callable

from infinity.tools.bench.measure import ContenderGroup, Measurement, Result


def run_group(
    group: ContenderGroup,
    *,
    rounds: int,
    warm_ups: int = 1,
    on_round: Callable[[int], object] = lambda _: None,
) -> Result:
    """The samples of `rounds` rounds, after `warm_ups` that are thrown away.

    Round by round: A B C, B C A, C A B. A failed comparison stays in its sample; an exception of a
    contender goes through.
    """
    contenders = [*group.subjects, *group.ceilings]
    names = [contender.name for contender in contenders]
    assert len(set(names)) == len(names), f"two contenders of one name in {names}"
    samples: dict[str, list[Measurement]] = {name: [] for name in names}
    for index in range(-warm_ups, rounds):
        on_round(index)
        turn = index % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            sample = contender.run()
            if index >= 0:
                samples[contender.name].append(sample)
    return Result(group, samples)

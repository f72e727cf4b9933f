"""The loss curve: its caption, its picture, and silence outside of a notebook."""

from __future__ import annotations

import re
import warnings

import torch

from infinity.observe.loss_curve import LossCurve


def points_of(curve: LossCurve) -> list[tuple[float, float]]:
    (line,) = re.findall(r"polyline points='([^']*)'", curve._repr_html_())
    return [tuple(map(float, point.split(","))) for point in line.split()]  # type: ignore[misc]


def test_lower_losses_are_drawn_lower_and_the_last_one_is_named(capsys) -> None:
    curve = LossCurve(4)
    for loss in (8.0, 4.0, 2.0):
        curve.add(loss)
    newest, middle, oldest = points_of(curve)
    assert oldest[0] < middle[0] < newest[0] and oldest[1] < middle[1] < newest[1]
    assert re.fullmatch(r"<LossCurve: step 3 of 4, loss 2, \d+:\d\d left>", repr(curve))
    assert "value='75.0'" in curve._repr_html_()
    assert "The loss fell from 8 to 2" in curve._repr_html_()
    assert capsys.readouterr().out == ""


def test_a_long_run_is_drawn_with_few_points_and_its_newest_loss() -> None:
    curve = LossCurve()
    for step in range(5000):
        curve.add(5000 - step)
    points = points_of(curve)
    assert len(points) <= 400 and points[0][0] == max(x for x, _ in points)
    assert repr(curve) == "<LossCurve: step 5000, loss 1>"


def test_losses_that_are_not_finite_leave_the_scale_alone() -> None:
    curve = LossCurve()
    for loss in (3.0, float("nan"), float("inf"), 1.0):
        curve.add(loss)
    assert len(points_of(curve)) == 2 and "nan" not in curve._repr_html_()
    assert LossCurve()._repr_html_() == "<div>no steps yet</div>"


def test_a_loss_with_its_graph_is_added_without_a_warning() -> None:
    curve = LossCurve()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        curve.add((torch.ones(2, requires_grad=True) * 2).mean())
    assert curve.losses == [2.0]

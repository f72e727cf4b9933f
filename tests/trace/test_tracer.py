"""Recording: nothing while it is off, facts and causes while it is on."""

from __future__ import annotations

import time

import pytest

from infinity.observe import Counters, Track


class Transfer:
    """A transfer that ends on a test's command."""

    def __init__(self, *passages: tuple[int, int, int, int]) -> None:
        self.over = passages
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def passages(self):
        return self.over if self.is_done else ()


def use_everything(counters: Counters) -> None:
    tracer = counters.tracer
    with tracer.step(1), tracer.during(Track.ENGINE, "enter"):
        tracer.begin("key", Track.MODULES, "block")
        with counters.timed("read_wait_s", "block needs its parameters"):
            pass
        counters.set("host_in_use_nbytes", 5)
        tracer.watch(Transfer((0, 1, 2, 3)), str, "parameters of block", 1)
        tracer.end("key")


def test_off_means_no_records():
    counters = Counters()
    use_everything(counters)
    assert counters.tracer.spans() == [] and counters.tracer.counts() == []
    assert counters.tracer.is_settled
    assert counters.snapshot()["read_wait_s"] >= 0, "counted all the same"


def test_a_new_recording_forgets_the_old_one_and_a_stopped_one_takes_no_more():
    counters = Counters()
    counters.tracer.start()
    use_everything(counters)
    counters.tracer.stop()
    use_everything(counters)
    names = sorted(span.name for span in counters.tracer.spans())
    assert names == ["block", "block needs its parameters", "enter", "step 1"]
    assert [count.value for count in counters.tracer.counts()] == [5]
    counters.tracer.start()
    assert counters.tracer.spans() == [] and counters.tracer.counts() == []


def test_stalls_are_exactly_what_the_counters_add_up_also_when_the_wait_fails():
    counters = Counters()
    counters.tracer.start()
    with pytest.raises(OSError), counters.timed("write_wait_s", "state must be written"):
        time.sleep(0.002)
        raise OSError
    with counters.timed("weights_s"):  # A sum over waits that are shown themselves.
        pass
    (span,) = counters.tracer.spans()
    assert (span.track, span.name) == (Track.STALLS, "state must be written")
    assert (span.end_ns - span.start_ns) / 1e9 == counters.snapshot()["write_wait_s"] >= 0.002


def test_a_stall_names_the_transfers_that_are_not_done():
    counters = Counters()
    counters.tracer.start()
    done, late, unknown = Transfer(), Transfer(), Transfer()
    done.is_done = True
    for transfer, name in ((done, "exp_avg of block"), (late, "gradients of block")):
        counters.tracer.watch(transfer, str, name, 1)
    with counters.timed("read_wait_s", "update of block", [done, late, unknown]):
        pass
    (span,) = counters.tracer.spans()
    assert span.args["waits_for"] == ["gradients of block"]
    assert span.args["transfers"] == [2]


def test_a_transfer_is_shown_once_it_is_over_per_file():
    tracer = Counters().tracer
    tracer.start()
    transfer = Transfer((7, 4096, 150, 200), (8, 8192, 90, 300))
    tracer.watch(transfer, lambda file: f"reads /drive{file}", "parameters of block", 100)
    tracer.stop()
    assert not tracer.is_settled and tracer.spans() == []
    transfer.is_done = True
    assert tracer.is_settled
    shown = {
        span.track: (span.start_ns, span.args["issued_ns"], span.end_ns) for span in tracer.spans()
    }
    assert shown == {"reads /drive7": (100, 150, 200), "reads /drive8": (100, 100, 300)}


def test_spans_with_one_key_end_last_in_first_out_and_unknown_ends_are_ignored():
    tracer = Counters().tracer
    tracer.begin("key", Track.MODULES, "before the recording")
    tracer.start()
    tracer.end("key")
    tracer.begin("key", Track.MODULES, "outer")
    tracer.begin("key", Track.MODULES, "inner")
    tracer.end("key")
    assert [span.name for span in tracer.spans()] == ["inner"]
    tracer.end("key")
    assert [span.name for span in tracer.spans()] == ["outer", "inner"]

"""The end of a transfer whose wait was interrupted."""

from __future__ import annotations

from infinity.state.store import Transfer


# INV-2: the block of a transfer is freed only behind this.
def await_end(transfer: Transfer | None) -> None:
    """Waits until a transfer has ended, and raises nothing: its error was raised by another wait,
    or comes behind an interrupt that is on its way. Nor does an interrupt end the wait."""
    while transfer is not None and not transfer.done():
        try:
            transfer.wait()
        except Exception:
            return
        except BaseException:  # Another Ctrl-C: the first one is being raised.
            continue

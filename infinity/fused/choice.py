"""Whether a device runs the Triton kernels, or the same arithmetic in torch operations.

No kernel is believed: before the first use of a kernel on a device, a trial compares its bits with
those of the torch operations, on random operands.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Hashable

import torch

from infinity.errors import UnsupportedError

VARIABLE = "INFINITY_DEVICE_KERNELS"
LEAST_CAPABILITY = (8, 0)  # Older devices are not supported by Triton.

_log = logging.getLogger("infinity")
_Trial = Callable[[], bool]


def asked() -> str:
    """Returns the kernels that the environment asks for: "triton", "torch", or "" for the best.

    Raises UnsupportedError for another name.
    """
    name = os.environ.get(VARIABLE, "")
    if name not in ("", "triton", "torch"):
        raise UnsupportedError(
            f"expected {VARIABLE} to be triton or torch, got {name!r}; unset it to use Triton "
            "kernels where the device runs them"
        )
    return name


def explain_no_triton(device: torch.device) -> str:
    """Returns why the device does not run Triton kernels, "" if it can. Compiles nothing."""
    if asked() == "torch":
        return f"{VARIABLE}=torch"
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    if torch.version.hip is not None:
        return "on ROCm the kernels were never compared"
    if not _has_triton():
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY, capability))
        return f"Triton needs compute capability {needed}, the device has {found}"
    return ""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Trials:
    """Remembers which kernels have the bits of torch's operations, per device. Any thread."""

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, str] = {}  # "" where the bits are the same.

    def explain_refusal(self, name: str, key: Hashable, device: torch.device, trial: _Trial) -> str:
        """Returns why the kernel is not used on the device, "" if it is used.

        name: of the kernel, for messages
        key: of everything that the kernel is compiled for
        trial: runs the kernel and returns whether its bits are those of the torch operations;
            called once per key and device, if at all
        Raises UnsupportedError if the environment asks for Triton and a trial fails.
        """
        known = (key, device, asked())
        if known in self._outcomes:
            return self._outcomes[known]
        reason = explain_no_triton(device)
        if reason:
            if asked() == "triton" and device.type == "cuda":
                raise UnsupportedError(f"{VARIABLE}=triton, but {reason}; unset {VARIABLE}")
            return reason
        return self._outcomes.setdefault(known, _outcome(name, device, trial))


def _outcome(name: str, device: torch.device, trial: _Trial) -> str:
    """Returns "" if the trial shows equal bits, else the reason, which is logged, too."""
    failure: Exception | None = None
    try:
        reason = "" if trial() else "its bits are not those of the torch operations"
    except Exception as error:  # No C compiler, a release of Triton that does not compile it, ...
        failure, reason = error, f"{type(error).__name__}: {error}"
    if not reason:
        _log.info("%s on %s: by a Triton kernel", name, device)
        return ""
    if asked() == "triton":
        raise UnsupportedError(
            f"{VARIABLE}=triton, but the kernel for {name} cannot be used on {device}: {reason}; "
            f"unset {VARIABLE} to use torch operations, which have the same bits and are slower"
        ) from failure
    _log.warning(
        "%s on %s: by torch operations, which are slower, because the Triton kernel failed its "
        "trial: %s", name, device, reason,
    )  # fmt: skip
    return reason

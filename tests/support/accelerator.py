"""The device of accelerator.cpp: built, registered with PyTorch, and as a device of the engine.

Registration is for the process, and makes it have an accelerator: only for a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from infinity.observe import Counters
from infinity.tiers.cuda import AcceleratorStreams
from infinity.tiers.host import HostPool
from infinity.tiers.streams import StreamDevice

NAME = "ours"
_SOURCE = Path(__file__).with_suffix(".cpp")
_TORCH = Path(torch.__file__).parent


def build() -> Path:
    """Returns the library, compiled by the compiler of the native tests: 15 s of one core. It is
    kept between runs, for this version of PyTorch."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is missing: apt-get install g++"
    directory = _SOURCE.parents[2] / "build" / "accelerator"
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / f"libaccelerator-{torch.__version__}.so"
    if library.exists() and library.stat().st_mtime > _SOURCE.stat().st_mtime:
        return library
    making = directory / f"{os.getpid()}.so"
    flags = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-I{_TORCH / 'include'}"]
    links = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(making), *links], check=True)
    return making.replace(library)


def register(library: Path) -> torch.device:
    """Makes the library the accelerator of this process. Returns its device."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    device = torch.device(NAME, 0)
    module: Any = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=torch.accelerator.set_device_index,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device: torch.empty(0),  # It has no generator.
        set_rng_state=lambda state, device: None,
        Stream=torch.Stream,
        Event=lambda enable_timing, blocking: torch.Event(device, blocking=blocking),
        current_stream=lambda device: torch.accelerator.current_stream(),
        stream=lambda stream: stream,
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda device: torch.accelerator.synchronize(),
    )
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return device


class Accelerator(StreamDevice):
    """The adapter of CUDA without the pinning, over the registered device."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def open(self, host: HostPool, counters: Counters) -> None:
        """See `tiers.device.DeviceAdapter.open`."""
        super().__init__(NAME, host, counters, AcceleratorStreams(self.torch_device))

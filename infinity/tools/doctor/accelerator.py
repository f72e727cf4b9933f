"""PyTorch, the CUDA devices it sees and the links they hang on; packages of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import infinity
from infinity.config import SwapConfig
from infinity.config.extras import TRIED, installed, release_of
from infinity.config.machine import pci_address, read_int, read_node, read_text
from infinity.errors import InfinityError, UnsupportedError
from infinity.namesake import other_distributions, other_places
from infinity.sizes import format_nbytes
from infinity.tools.doctor import Finding


@dataclass(frozen=True, slots=True)
class Link:
    """A PCI Express link: lanes in use, and its maximum of lanes and transfers per second."""

    num_lanes: int
    max_lanes: int
    max_gigatransfers_s: float
    numa_node: int | None

    @property
    def max_nbytes_s(self) -> float:
        """The rate of one direction over all lanes, after line coding: 8b/10b until generation 2,
        then 128b/130b.

        Generation 6 (64 GT/s) codes in flits of 256 bytes, 242 of them for data.
        """
        rate = self.max_gigatransfers_s
        coding = 0.8 if rate <= 5 else 128 / 130 if rate < 64 else 242 / 256
        return rate * 1e9 * coding * self.max_lanes / 8


def examine(config: SwapConfig, root: Path) -> Iterator[Finding]:
    """Yields the findings on PyTorch and on the device."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded.
        yield check_torch(None, str(error))
        return
    yield check_torch(torch.__version__, "")
    cuda = torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    gpus = [cuda.get_device_properties(index) for index in range(count)]
    yield check_cuda(config.tiers.device.kind, gpus, built_for=torch.version.cuda)
    if config.tiers.device.kind != "cpu":
        for index, gpu in enumerate(gpus):
            yield check_link(index, find_link(root, pci_address(gpu)))
            yield check_kernels(index, _explain_torch_operations(index))


def check_torch(version: str | None, failure: str) -> Finding:
    """Finds whether PyTorch can be imported and was tried. `failure`: the import's message."""
    if version is not None:
        return check_release("torch", version)
    it = Finding("torch", f"cannot be imported: {failure}")
    return it.missing("nothing can be trained", f"pip install 'torch{TRIED['torch'].wanted}'")


def check_cuda(kind: str, gpus: Sequence[Any], *, built_for: str | None) -> Finding:
    """`kind` is tiers.device.kind; `gpus` are torch's properties of devices; `built_for` is the
    CUDA version of torch's build, if any."""
    described = "; ".join(
        f"{gpu.name}, {format_nbytes(gpu.total_memory)}"
        + " shared with the host" * bool(getattr(gpu, "is_integrated", False))
        for gpu in gpus
    )
    if kind == "cpu":
        return Finding("CUDA", f"not asked for ({described or 'no device'})")
    if gpus:
        return Finding("CUDA", f"{built_for}: {described}")
    it = Finding("CUDA", "torch is built without it")
    remedy = "Install a build of torch for CUDA: https://pytorch.org/get-started/locally."
    if built_for:
        it = Finding("CUDA", f"no device for torch's CUDA {built_for}")
        remedy = "Check nvidia-smi; in a container: docker run --gpus all."
    if kind == "cuda":
        return it.missing('tiers.device.kind = "cuda" cannot be kept', remedy)
    return it.degraded("the model computes on the CPU", remedy)


def left_to_host(config: SwapConfig, available_nbytes: int) -> int:
    """Returns the host's part of memory where the device may have its memory from it, too."""
    try:
        from infinity.tiers.open_device import device_kind, is_integrated

        if is_integrated(device_kind(config.tiers.device)):
            return config.tiers.parts_of_pool(available_nbytes)[1]
    except (ImportError, OSError, InfinityError):  # Other lines, or the start, say so.
        pass
    return available_nbytes


def find_link(root: Path, pci_address: str) -> Link | None:
    """Returns None if sysfs does not show the link, or shows a virtual link without lanes."""
    folder = root / "sys/bus/pci/devices" / pci_address
    rate = re.match(r"[\d.]+", read_text(folder / "max_link_speed") or "")
    num_lanes = read_int(folder / "current_link_width")
    max_lanes = read_int(folder / "max_link_width")
    if not pci_address or rate is None or not num_lanes or not max_lanes:
        return None
    if max_lanes == 255:  # The kernel's value for "unknown".
        return None
    return Link(num_lanes, max_lanes, float(rate[0]), read_node(folder / "numa_node"))


def check_link(index: int, link: Link | None) -> Finding:
    """Judges the lanes only. An idle device lowers its speed to save power, but not its lanes."""
    subject = f"CUDA device {index}: link"
    if link is None:
        return Finding(subject, "not visible from here")
    it = Finding(
        subject,
        f"PCI Express {link.max_gigatransfers_s:g} GT/s x{link.max_lanes}, at most "
        f"{link.max_nbytes_s / 1e9:.1f} GB/s each way"
        + ("" if link.numa_node is None else f", NUMA node {link.numa_node}"),
    )
    if link.num_lanes >= link.max_lanes:
        return it
    return it.more(f"; only {link.num_lanes} lanes in use").degraded(
        f"transfers to the device take {link.max_lanes / link.num_lanes:g} times as long",
        "Move the card to a full slot, or stop sharing the slot's lanes.",
    )


def check_kernels(index: int, reasons: Mapping[str, str]) -> Finding:
    """`reasons`: per operation why torch operations make it, "" if a Triton kernel does."""
    fused = [name for name, reason in reasons.items() if not reason]
    found = f"Triton for {', '.join(fused)}" if fused else "torch operations"
    it = Finding(f"CUDA device {index}: kernels", found)
    slow = {name: reason for name, reason in reasons.items() if reason}
    if not slow:
        return it
    return it.more("".join(f"; {name}: {reason}" for name, reason in slow.items())).degraded(
        f"torch operations for {', '.join(slow)}: the same bits, in many passes over memory",
        "pip install triton, in the version that torch's build for CUDA names; unset "
        "INFINITY_DEVICE_KERNELS.",
    )


def _explain_torch_operations(index: int) -> dict[str, str]:
    import torch

    from infinity.codecs import AffineGroups, FloatBlocks, TableBlocks, mxfp4
    from infinity.codecs.on_device import explain_refusal
    from infinity.ops.on_device import explain_refusal as explain_update
    from infinity.ops.rules import AdamWSettings

    recipe = AdamWSettings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
    device = torch.device("cuda", index)
    try:
        reasons = {
            codec.format: explain_refusal(codec, torch.bfloat16, device)
            for codec in (FloatBlocks(), AffineGroups(), mxfp4(), TableBlocks())
        }
        update = explain_update(recipe, device, torch.float32, is_split=True)
    except UnsupportedError as error:  # The environment asks for kernels that do not run.
        return {"decoding and updates": str(error)}
    return {**reasons, "updates": update}


# -- Releases of the packages that this one is built on, and others of its own name ----------------


def examine_packages() -> Iterator[Finding]:
    """Yields the findings on packages; PyTorch's is `examine` reports."""
    for package in ("transformers", "peft", "trl"):
        if found := installed(package):
            yield check_release(package, found)
        else:
            yield Finding(package, f"not installed (tried: {TRIED[package]})")
    own = Path(infinity.__file__ or "").parent
    yield check_namesakes(other_distributions(), other_places(own))


def check_release(package: str, found: str) -> Finding:
    """Judges a release by those that were tried."""
    tried, release = TRIED[package], release_of(found)
    it = Finding(package, f"{found} (tried: {tried})")
    if not tried.oldest <= release < (tried.newest[0] + 1,):
        return it.missing("what needs it is refused", f"pip install '{package}{tried.wanted}'")
    if release <= tried.newest:
        return it
    older = f"pip install '{package}<{tried.newest[0]}.{tried.newest[1] + 1}'"
    return it.degraded("no test has run with it", f"{older}, or compare a step with plain PyTorch.")


def check_namesakes(distributions: list[str], places: list[str]) -> Finding:
    """Judges other packages called `infinity`: distributions with files in it, and places on the
    path of a program that is started here."""
    subject = "package infinity"
    if distributions:
        it = Finding(subject, f"{', '.join(distributions)} has files of a package infinity, too")
        return it.missing(
            "the one that was installed last has replaced files of the other",
            f"An environment for each; or pip uninstall {' '.join(distributions)} "
            "infinity-offload, then pip install infinity-offload.",
        )
    if places:
        it = Finding(subject, f"another one is on the path: {', '.join(places)}")
        return it.degraded(
            "a program that is started here may import that one",
            "Start programs in another directory, or take its folder from PYTHONPATH.",
        )
    return Finding(subject, "no other of this name")

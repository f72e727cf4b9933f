"""The Triton kernel that updates optimizer state: the rules of `csrc/update/rules`, in one pass.

Every operation is the one of the native kernels: `tl.fma` where they fuse a product and a sum,
`tl.sqrt_rn` and `tl.div_rn`, which are rounded correctly, and products and sums that the launch
forbids to contract. The last numel % 8 elements are a tail with other fused products, as in
torch's kernels: see infinity/ops/rules.py.
"""

import triton
import triton.language as tl

_REFERENCE_LANES = tl.constexpr(8)
# Nothing is compiled apart for these: a trial compiles what every later launch runs.
_ARRAYS = ("weights", "residuals", "gradients", "states0", "states1", "numel")


@triton.jit
def _decayed(weight, gradient, weight_decay):
    """The gradient with weight decay. Without it nothing is added: 0 * infinity would be NaN."""
    added = tl.fma(weight, weight_decay, gradient)
    return tl.where(weight_decay != 0.0, added, gradient)


@triton.jit
def _stepped(
    weight, gradient, state0, state1, is_tail, c0, c1, c2, c3, c4, c5, c6, c7, rule: tl.constexpr
):
    """The new weight and states. Coefficients are those of `Settings.coefficients`, in order."""
    if rule == "adam":
        weight_decay, decay, lerp, beta2, square_weight = c0, c1, c2, c3, c4
        correction2_sqrt, eps, step_size = c5, c6, c7
        gradient = _decayed(weight, gradient, weight_decay)
        is_small = lerp < 0.5  # Interpolated from the nearer end.
        # Without beta1 this is a zero, whose sign shows in the sign of a zero moment.
        far_lerp = tl.where(is_tail, -(1.0 - lerp), lerp - 1.0)
        start = tl.where(is_small, state0, gradient)
        state0 = tl.fma(gradient - state0, tl.where(is_small, lerp, far_lerp), start)
        part = gradient * square_weight
        body_sq = tl.fma(gradient, part, state1 * beta2)
        tail_sq = tl.fma(state1, beta2, part * gradient)
        state1 = tl.where(is_tail, tail_sq, body_sq)
        root = tl.div_rn(tl.sqrt_rn(state1), correction2_sqrt)
        weight = weight * decay + tl.div_rn(state0 * -step_size, root + eps)
    elif rule == "lion":
        decay, lr, beta1, weight1, beta2, weight2 = c0, c1, c2, c3, c4, c5
        direction = tl.fma(gradient, weight1, state0 * beta1)
        state0 = tl.fma(gradient, weight2, state0 * beta2)
        move = tl.where(direction > 0.0, lr, tl.where(direction < 0.0, -lr, 0.0))
        weight = weight * decay - move
    else:
        lr, weight_decay = c0, c1
        direction = _decayed(weight, gradient, weight_decay)
        if rule == "momentum_sgd":
            momentum, gradient_weight, is_nesterov, is_first = c2, c3, c4, c5
            gradient = direction
            body = tl.fma(gradient, gradient_weight, state0 * momentum)
            tail = tl.fma(state0, momentum, gradient * gradient_weight)
            mixed = tl.where(is_tail, tail, body)
            state0 = tl.where(is_first != 0.0, gradient, mixed)
            ahead = tl.fma(state0, momentum, gradient)
            direction = tl.where(is_nesterov != 0.0, ahead, state0)
        weight = tl.fma(direction, -lr, weight)
    return weight, state0, state1


@triton.jit(do_not_specialize=_ARRAYS, do_not_specialize_on_alignment=_ARRAYS)
def update(
    weights,
    residuals,
    gradients,
    states0,
    states1,
    numel: tl.int64,
    grad_scale,
    c0,
    c1,
    c2,
    c3,
    c4,
    c5,
    c6,
    c7,
    rule: tl.constexpr,
    num_states: tl.constexpr,
    is_split: tl.constexpr,
    is_gradient_bf16: tl.constexpr,
    program_numel: tl.constexpr,
):
    """One step of a span in place. bf16 arrays are pointers to int16."""
    at = tl.program_id(0).to(tl.int64) * program_numel + tl.arange(0, program_numel)
    mask = at < numel
    is_tail = at >= numel - numel % _REFERENCE_LANES
    gradient = tl.load(gradients + at, mask=mask)
    if is_gradient_bf16:
        gradient = (gradient.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    gradient = gradient * grad_scale
    weight = tl.load(weights + at, mask=mask)
    if is_split:
        residual = tl.load(residuals + at, mask=mask).to(tl.int32)
        weight = ((weight.to(tl.int32) << 16) + residual).to(tl.float32, bitcast=True)
    state0, state1 = gradient, gradient
    if num_states > 0:
        state0 = tl.load(states0 + at, mask=mask)
    if num_states > 1:
        state1 = tl.load(states1 + at, mask=mask)
    weight, state0, state1 = _stepped(
        weight, gradient, state0, state1, is_tail, c0, c1, c2, c3, c4, c5, c6, c7, rule
    )
    if num_states > 0:
        tl.store(states0 + at, state0, mask=mask)
    if num_states > 1:
        tl.store(states1 + at, state1, mask=mask)
    if is_split:
        bits = weight.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(is_nan, -0x400000, bits)  # 0xFFC00000, the canonical quiet NaN.
        residual = (bits << 16) >> 16
        tl.store(residuals + at, residual.to(tl.int16), mask=mask)
        tl.store(weights + at, ((bits - residual) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(weights + at, weight, mask=mask)

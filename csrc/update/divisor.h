// Division of many square roots by one number, without the divider, which the root itself and the
// step's own division keep busy. The quotient is the correctly rounded one, bit for bit.
//
// Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990,
// theorem 8.1 (a faithful quotient, corrected once with the rounded reciprocal, is the rounded
// one); Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when
// the divisor is known in advance", 2004 (the reciprocal in two parts).
#pragma once

#include "lanes_scalar.h"

namespace infinity::update {
namespace {

template <class L>
class Divisor {
  using Float = typename L::Float;

 public:
  explicit Divisor(float divisor)
      : is_in_range_(divisor >= 0x1p-60F && divisor <= 1.0F),
        divisor_(L::broadcast(divisor)),
        minus_divisor_(L::broadcast(-divisor)) {
    const float reciprocal = 1.0F / divisor;
    reciprocal_ = L::broadcast(reciprocal);
    remainder_ = L::broadcast(__builtin_fmaf(-divisor, reciprocal, 1.0F) / divisor);
  }

  // root / divisor. `root` must be what a square root can be: +0, 2^-75 ... 2^64, infinity or NaN;
  // then no step below underflows or overflows.
  [[nodiscard]] Float divide(Float root) const {
    if constexpr (L::kCount == 1) return L::div(root, divisor_);
    if (!is_in_range_) return L::div(root, divisor_);
    // Within one place of the quotient, then exactly what is left of it.
    const Float quotient = L::fma(root, reciprocal_, L::mul(root, remainder_));
    const Float left = L::fma(quotient, minus_divisor_, root);
    return L::keep_infinity(root, L::fma(left, reciprocal_, quotient));
  }

 private:
  bool is_in_range_;
  Float divisor_, minus_divisor_, reciprocal_, remainder_;
};

}  // namespace
}  // namespace infinity::update

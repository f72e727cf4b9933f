// Lion: a step of one size, in the direction of the sign of an interpolated momentum.
//
// torch has none, so the arithmetic is our own and has no tail of its own.
//
// Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
#pragma once

#include "../lanes_scalar.h"

namespace infinity::update {
namespace {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr std::size_t kStates = 1;  // exp_avg
  static constexpr bool kIsHeavy = false;

  struct Coefficients {
    float decay;  // 1 - lr * weight_decay
    float lr;
    float beta1;
    float gradient_weight1;  // 1 - beta1
    float beta2;
    float gradient_weight2;  // 1 - beta2
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c)
        : decay_(L::broadcast(c.decay)),
          lr_(L::broadcast(c.lr)),
          beta1_(L::broadcast(c.beta1)),
          gradient_weight1_(L::broadcast(c.gradient_weight1)),
          beta2_(L::broadcast(c.beta2)),
          gradient_weight2_(L::broadcast(c.gradient_weight2)) {}

    Float operator()(Float weight, Float gradient, Float* states) const {
      const Float direction = L::fma(gradient, gradient_weight1_, L::mul(states[0], beta1_));
      states[0] = L::fma(gradient, gradient_weight2_, L::mul(states[0], beta2_));
      return L::sub(L::mul(weight, decay_), L::signed_by(direction, lr_));
    }

   private:
    Float decay_, lr_, beta1_, gradient_weight1_, beta2_, gradient_weight2_;
  };
};

}  // namespace
}  // namespace infinity::update

// Adam: weight decay is added to the gradient, in the arithmetic of torch.optim.Adam(fused=True).
//
// Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.
#pragma once

#include "adamw.h"

namespace infinity::update {
namespace {

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr std::size_t kStates = 2;  // exp_avg, exp_avg_sq
  static constexpr bool kIsHeavy = true;

  struct Coefficients {
    float weight_decay;
    AdamW::Coefficients common;  // Its `decay` is not used.
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c)
        : moments_(c.common),
          weight_decay_(L::broadcast(c.weight_decay)),
          has_decay_(c.weight_decay != 0.0F) {}

    Float operator()(Float weight, Float gradient, Float* states) const {
      // Without decay nothing is added: 0 * infinity would be NaN.
      const Float decayed = has_decay_ ? L::fma(weight, weight_decay_, gradient) : gradient;
      return moments_.step(weight, decayed, states);
    }

   private:
    AdamW::Moments<L, kIsTail> moments_;
    Float weight_decay_;
    bool has_decay_;
  };
};

}  // namespace
}  // namespace infinity::update

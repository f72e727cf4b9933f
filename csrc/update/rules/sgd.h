// Stochastic gradient descent with and without momentum, in the arithmetic of
// torch.optim.SGD(fused=True).
//
// Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
// 2013, in the form that torch.optim.SGD documents.
#pragma once

#include "../lanes_scalar.h"

namespace infinity::update {
namespace {

struct PlainSgd {
  static constexpr const char* kName = "sgd";
  static constexpr std::size_t kStates = 0;
  static constexpr bool kIsHeavy = false;

  struct Coefficients {
    float lr;
    float weight_decay;
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c)
        : minus_lr_(L::broadcast(-c.lr)),
          weight_decay_(L::broadcast(c.weight_decay)),
          has_decay_(c.weight_decay != 0.0F) {}

    [[nodiscard]] Float decayed(Float weight, Float gradient) const {
      return has_decay_ ? L::fma(weight, weight_decay_, gradient) : gradient;
    }
    [[nodiscard]] Float moved(Float weight, Float direction) const {
      return L::fma(direction, minus_lr_, weight);
    }
    Float operator()(Float weight, Float gradient, Float* /*states*/) const {
      return moved(weight, decayed(weight, gradient));
    }

   private:
    Float minus_lr_, weight_decay_;
    bool has_decay_;
  };
};

struct MomentumSgd {
  static constexpr const char* kName = "momentum_sgd";
  static constexpr std::size_t kStates = 1;  // momentum
  static constexpr bool kIsHeavy = false;

  struct Coefficients {
    PlainSgd::Coefficients plain;
    float momentum;
    float gradient_weight;  // 1 - dampening
    float is_nesterov;      // 0 or 1
    float is_first;         // 0 or 1: the first step starts the momentum with the gradient.
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c)
        : plain_(c.plain),
          momentum_(L::broadcast(c.momentum)),
          gradient_weight_(L::broadcast(c.gradient_weight)),
          is_nesterov_(c.is_nesterov != 0.0F),
          is_first_(c.is_first != 0.0F) {}

    Float operator()(Float weight, Float gradient, Float* states) const {
      const Float decayed = plain_.decayed(weight, gradient);
      states[0] = is_first_ ? decayed : mixed(states[0], decayed);
      return plain_.moved(weight, is_nesterov_ ? L::fma(states[0], momentum_, decayed) : states[0]);
    }

   private:
    // As with AdamW, torch fuses one product in its vectors and the other in its tail.
    [[nodiscard]] Float mixed(Float old, Float gradient) const {
      return kIsTail ? L::fma(old, momentum_, L::mul(gradient, gradient_weight_))
                     : L::fma(gradient, gradient_weight_, L::mul(old, momentum_));
    }

    typename PlainSgd::template Step<L, kIsTail> plain_;
    Float momentum_, gradient_weight_;
    bool is_nesterov_, is_first_;
  };
};

}  // namespace
}  // namespace infinity::update

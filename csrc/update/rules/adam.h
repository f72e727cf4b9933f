// Adam and AdamW, in the arithmetic of torch.optim.Adam(fused=True) and AdamW(fused=True).
//
// Adam adds weight decay to the gradient, AdamW multiplies the weight: each has the coefficient of
// the other that changes nothing. torch's kernels were compiled with contraction, so some of their
// sums are fused multiply-adds, and in the tail another product of the second moment's sum is the
// fused one. Both are written out here.
//
// Sources: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1;
// Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
#pragma once

#include "../divisor.h"
#include "../lanes_scalar.h"

namespace infinity::update {
namespace {

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr std::size_t kStates = 2;  // exp_avg, exp_avg_sq
  static constexpr bool kIsHeavy = true;

  struct Coefficients {
    float weight_decay;  // Of Adam.
    float decay;         // 1 - lr * weight_decay of AdamW, 1 of Adam.
    float lerp_weight;  // 1 - beta1
    float beta2;
    float square_weight;     // 1 - beta2
    float correction2_sqrt;  // sqrt(1 - beta2^step)
    float eps;
    float step_size;  // lr / (1 - beta1^step)
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c)
        : has_weight_decay_(c.weight_decay != 0.0F),
          is_lerp_small_(c.lerp_weight < 0.5F),
          weight_decay_(L::broadcast(c.weight_decay)),
          decay_(L::broadcast(c.decay)),
          lerp_(L::broadcast(is_lerp_small_ ? c.lerp_weight : far_lerp(c.lerp_weight))),
          beta2_(L::broadcast(c.beta2)),
          square_weight_(L::broadcast(c.square_weight)),
          correction2_sqrt_(c.correction2_sqrt),
          eps_(L::broadcast(c.eps)),
          minus_step_size_(L::broadcast(-c.step_size)) {}

    Float operator()(Float weight, Float undecayed, Float* states) const {
      // Without decay nothing is added: 0 * infinity would be NaN.
      const Float gradient =
          has_weight_decay_ ? L::fma(weight, weight_decay_, undecayed) : undecayed;
      // Interpolated from the nearer end.
      const Float start = is_lerp_small_ ? states[0] : gradient;
      const Float exp_avg = L::fma(L::sub(gradient, states[0]), lerp_, start);

      const Float part = L::mul(gradient, square_weight_);
      const Float exp_avg_sq = kIsTail ? L::fma(states[1], beta2_, L::mul(part, gradient))
                                       : L::fma(gradient, part, L::mul(states[1], beta2_));
      states[0] = exp_avg;
      states[1] = exp_avg_sq;

      const Float denominator = L::add(correction2_sqrt_.divide(L::sqrt(exp_avg_sq)), eps_);
      return L::add(L::mul(weight, decay_), L::div(L::mul(exp_avg, minus_step_size_), denominator));
    }

   private:
    // Without beta1 this is a zero, whose sign shows in the sign of a zero moment.
    static float far_lerp(float weight) { return kIsTail ? -(1.0F - weight) : weight - 1.0F; }

    bool has_weight_decay_, is_lerp_small_;
    Float weight_decay_, decay_, lerp_, beta2_, square_weight_;
    Divisor<L> correction2_sqrt_;
    Float eps_, minus_step_size_;
  };
};

}  // namespace
}  // namespace infinity::update

// The ceiling that benchmarks measure the other rules against: the streams of AdamW, 4 in and 3
// out, with one addition each. It trains nothing.
#pragma once

#include "../lanes_scalar.h"

namespace infinity::update {
namespace {

struct Stream {
  static constexpr const char* kName = "stream";
  static constexpr std::size_t kStates = 2;
  static constexpr bool kIsHeavy = false;

  struct Coefficients {
    float addend;
  };

  template <class L, bool kIsTail>
  class Step {
    using Float = typename L::Float;

   public:
    explicit Step(const Coefficients& c) : addend_(L::broadcast(c.addend)) {}

    Float operator()(Float weight, Float gradient, Float* states) const {
      states[0] = L::add(states[0], addend_);
      states[1] = L::add(states[1], addend_);
      return L::add(weight, gradient);
    }

   private:
    Float addend_;
  };
};

}  // namespace
}  // namespace infinity::update

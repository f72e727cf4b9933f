// One pass over a part of a span: load, let the rule decide, store.
#pragma once

#include "lanes_scalar.h"

namespace infinity::update {
namespace {

// How far ahead the arrays of a split span are asked for, by rules with roots and divisions
// (kIsHeavy). Their long iterations leave few loads in flight, and with nine streams the hardware's
// prefetchers lag. With the seven of fp32, or with a light rule, asking costs more than it brings.
// Measured on Zen 4 with bench/update_kernel.py: 0.88 of the ceiling without, 0.98 with; at twice
// this distance worse again.
inline constexpr std::size_t kPrefetchNumel = 256;
inline constexpr std::size_t kCacheLineNbytes = 64;

// Inlined by force: GCC sees a function without effects and would drop the call.
[[gnu::always_inline]] inline void prefetch(const void* start, std::size_t offset_nbytes,
                                            std::size_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(start) + offset_nbytes;
  for (std::size_t i = 0; i < nbytes; i += kCacheLineNbytes) __builtin_prefetch(bytes + i);
}

// Stores past the caches need whole cache lines at their own boundaries. An array that is updated in
// place is in the cache already.
template <class Rule, WeightFormat kWeight>
bool can_pass_caches(const Span& span, std::size_t start) {
  constexpr std::size_t kWeightNbytes = kWeight == WeightFormat::kFp32 ? 4 : 2;
  const auto can_pass = [start](const void* from, const void* to, std::size_t element_nbytes) {
    const auto address = reinterpret_cast<std::uintptr_t>(to) + start * element_nbytes;
    return from != to && address % kCacheLineNbytes == 0;
  };
  bool can = can_pass(span.from.weight, span.to.weight, kWeightNbytes);
  if constexpr (kWeight == WeightFormat::kSplit) {
    can = can && can_pass(span.from.residual, span.to.residual, 2);
  }
  for (std::size_t s = 0; s < Rule::kStates; ++s) {
    can = can && can_pass(span.from.states[s], span.to.states[s], 4);
  }
  return can;
}

// Whoever is told that the update is over reads the new bytes.
inline void order_stores_past_caches() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// `kPastCaches`: new bytes go to memory, whose old ones are then not read before: four bytes of
// traffic less for every four that are written.
template <class Rule, WeightFormat kWeight, GradientFormat kGradient, bool kPastCaches>
struct Streams {
  static constexpr std::size_t kStates = Rule::kStates;

  Span span;  // A copy, so that no store can be taken to change an address.

  // What the vector at i + kPrefetchNumel will need; beyond the end it is harmless.
  template <class L>
  [[gnu::always_inline]] void prefetch_ahead(std::size_t i) const {
    if constexpr (Rule::kIsHeavy && kWeight == WeightFormat::kSplit && L::kCount != 1) {
      constexpr std::size_t kGradientNbytes = kGradient == GradientFormat::kFp32 ? 4 : 2;
      const std::size_t ahead = i + kPrefetchNumel;
      prefetch(span.from.weight, 2 * ahead, 2 * L::kCount);
      prefetch(span.from.residual, 2 * ahead, 2 * L::kCount);
      prefetch(span.gradient, kGradientNbytes * ahead, kGradientNbytes * L::kCount);
      for (std::size_t s = 0; s < Rule::kStates; ++s) {
        prefetch(span.from.states[s], 4 * ahead, 4 * L::kCount);
      }
    }
  }
  template <class L>
  typename L::Float load_weight(std::size_t i) const {
    if constexpr (kWeight == WeightFormat::kFp32) {
      return L::load(static_cast<const float*>(span.from.weight) + i);
    } else {
      return L::load_split(static_cast<const std::uint16_t*>(span.from.weight) + i,
                           span.from.residual + i);
    }
  }
  template <class L>
  void store_weight(std::size_t i, typename L::Float weight) const {
    if constexpr (kWeight == WeightFormat::kFp32) {
      L::template store<kPastCaches>(static_cast<float*>(span.to.weight) + i, weight);
    } else {
      L::template store_split<kPastCaches>(static_cast<std::uint16_t*>(span.to.weight) + i,
                                           span.to.residual + i, weight);
    }
  }
  template <class L>
  void store_state(std::size_t s, std::size_t i, typename L::Float state) const {
    L::template store<kPastCaches>(span.to.states[s] + i, state);
  }
  template <class L>
  typename L::Float load_gradient(std::size_t i) const {
    if constexpr (kGradient == GradientFormat::kFp32) {
      return L::load(static_cast<const float*>(span.gradient) + i);
    } else {
      return L::load_bf16(static_cast<const std::uint16_t*>(span.gradient) + i);
    }
  }
};

// Elements [i, stop) as long as whole vectors fit. Returns where it stopped.
template <class L, class Step, class S>
std::size_t run_lanes(const S& streams, std::size_t i, std::size_t stop, const Step& step,
                      float gradient_scale) {
  using Float = typename L::Float;
  const Float scale = L::broadcast(gradient_scale);
  for (; i + L::kCount <= stop; i += L::kCount) {
    streams.template prefetch_ahead<L>(i);
    const Float gradient = L::mul(streams.template load_gradient<L>(i), scale);
    Float states[S::kStates + 1];  // One more than used: a rule may have none.
    for (std::size_t s = 0; s < S::kStates; ++s) {
      states[s] = L::load(streams.span.from.states[s] + i);
    }
    const Float weight = step(streams.template load_weight<L>(i), gradient, states);
    for (std::size_t s = 0; s < S::kStates; ++s) streams.template store_state<L>(s, i, states[s]);
    streams.template store_weight<L>(i, weight);
  }
  return i;
}

template <class L, class Rule, WeightFormat kWeight, GradientFormat kGradient, bool kPastCaches>
void sweep_to(const Span& span, std::size_t start, std::size_t stop, bool is_last,
              const float* coefficients, float gradient_scale) {
  typename Rule::Coefficients c;
  __builtin_memcpy(&c, coefficients, sizeof c);
  const Streams<Rule, kWeight, kGradient, kPastCaches> streams{span};

  // Wide vectors first; where they do not fit, one element at a time with the same arithmetic.
  const std::size_t body_stop = is_last ? stop - stop % kReferenceLanes : stop;
  const typename Rule::template Step<L, false> wide(c);
  std::size_t i = run_lanes<L>(streams, start, body_stop, wide, gradient_scale);
  const typename Rule::template Step<ScalarLanes, false> body(c);
  i = run_lanes<ScalarLanes>(streams, i, body_stop, body, gradient_scale);
  const typename Rule::template Step<ScalarLanes, true> tail(c);
  run_lanes<ScalarLanes>(streams, i, stop, tail, gradient_scale);
  if constexpr (kPastCaches) order_stores_past_caches();
}

template <class L, class Rule, WeightFormat kWeight, GradientFormat kGradient>
void sweep(const Span& span, std::size_t start, std::size_t stop, bool is_last,
           const float* coefficients, float gradient_scale) {
  const auto run = can_pass_caches<Rule, kWeight>(span, start)
                       ? &sweep_to<L, Rule, kWeight, kGradient, true>
                       : &sweep_to<L, Rule, kWeight, kGradient, false>;
  run(span, start, stop, is_last, coefficients, gradient_scale);
}

}  // namespace
}  // namespace infinity::update

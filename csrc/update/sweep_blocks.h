// A pass over a span whose states are 8-bit codes: block by block they are widened to fp32, updated
// by the same sweep as fp32 states, and coded anew with a new scale. A block stays in the nearest
// cache meanwhile.
#pragma once

#include "dynamic_map.h"
#include "sweep.h"

namespace infinity::update {
namespace {

inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;
inline constexpr float kQuietNan = __builtin_nanf("");

// `values` of numel codes; a block's scale.
template <class V, bool kIsSigned>
void decode_block(const std::uint8_t* codes, float scale, float* values, std::size_t numel) {
  std::size_t i = 0;
  const auto wide = V::broadcast(scale);
  for (; i + V::kCount <= numel; i += V::kCount) {
    V::store(values + i, V::mul(V::template decode<kIsSigned>(codes + i), wide));
  }
  for (; i < numel; ++i) values[i] = ScalarLanes::decode<kIsSigned>(codes + i) * scale;
}

// Returns the scale.
template <class V, bool kIsSigned>
float encode_block(const float* values, std::uint8_t* codes, std::size_t numel) {
  // As integers magnitudes are ordered as they are as numbers, with infinity and NaN above all; and
  // a maximum is the same in whatever order it is taken.
  std::size_t i = 0;
  auto largest_bits = V::no_magnitude();
  for (; i + V::kCount <= numel; i += V::kCount) {
    largest_bits = V::max_magnitude(largest_bits, V::load(values + i));
  }
  std::uint32_t largest = V::largest(largest_bits);
  for (; i < numel; ++i) {
    largest = ScalarLanes::max_magnitude(largest, values[i]);
  }
  float scale = bits_to_float(largest);
  if (largest >= kInfinityBits || scale < 0x1p-126F) {
    // One element that is not finite makes the block NaN: codes could not tell which it was. What
    // is too small for a normal number is zero.
    scale = largest >= kInfinityBits ? kQuietNan : 0.0F;
    __builtin_memset(codes, kIsSigned ? kSignedZero : 0, numel);
    return scale;
  }
  const float reciprocal = 1.0F / scale;
  const auto wide = V::broadcast(reciprocal);
  for (i = 0; i + V::kCount <= numel; i += V::kCount) {
    V::template encode<kIsSigned>(codes + i, V::mul(V::load(values + i), wide));
  }
  for (; i < numel; ++i) ScalarLanes::encode<kIsSigned>(codes + i, values[i] * reciprocal);
  return scale;
}

template <WeightFormat kWeight, GradientFormat kGradient>
Span block_of(const Span& span, std::size_t start, std::size_t numel) {
  constexpr std::size_t kWeightNbytes = kWeight == WeightFormat::kFp32 ? 4 : 2;
  constexpr std::size_t kGradientNbytes = kGradient == GradientFormat::kFp32 ? 4 : 2;
  Span block;
  const auto arrays_of = [start](const Arrays& all, Arrays* part) {
    part->weight = static_cast<unsigned char*>(all.weight) + kWeightNbytes * start;
    if (kWeight == WeightFormat::kSplit) part->residual = all.residual + start;
  };
  arrays_of(span.from, &block.from);
  arrays_of(span.to, &block.to);
  block.gradient = static_cast<const unsigned char*>(span.gradient) + kGradientNbytes * start;
  block.numel = numel;
  return block;
}

// `V` are lanes of one vector, `L` those that suit the weight format.
template <class V, class L, class Rule, WeightFormat kWeight, GradientFormat kGradient>
void sweep_blocks(const Span& span, std::size_t start, std::size_t stop, bool is_last,
                  const float* coefficients, float gradient_scale) {
  alignas(64) float first[kBlockNumel];   // A mean, with a sign.
  alignas(64) float second[kBlockNumel];  // A mean of squares.
  for (std::size_t i = start; i < stop; i += kBlockNumel) {
    const std::size_t numel = stop - i < kBlockNumel ? stop - i : kBlockNumel;
    Span block = block_of<kWeight, kGradient>(span, i, numel);
    const std::size_t index = i / kBlockNumel;
    if constexpr (Rule::kStates > 0) {
      block.from.states[0] = block.to.states[0] = first;
      decode_block<V, true>(span.from.codes[0] + i, span.from.scales[0][index], first, numel);
    }
    if constexpr (Rule::kStates > 1) {
      block.from.states[1] = block.to.states[1] = second;
      decode_block<V, false>(span.from.codes[1] + i, span.from.scales[1][index], second, numel);
    }
    sweep<L, Rule, kWeight, kGradient>(block, 0, numel, is_last && i + numel == stop, coefficients,
                                       gradient_scale);
    if constexpr (Rule::kStates > 0) {
      span.to.scales[0][index] = encode_block<V, true>(first, span.to.codes[0] + i, numel);
    }
    if constexpr (Rule::kStates > 1) {
      span.to.scales[1][index] = encode_block<V, false>(second, span.to.codes[1] + i, numel);
    }
  }
}

}  // namespace
}  // namespace infinity::update

// What an update works on: addresses and a count of elements. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::update {

inline constexpr std::size_t kMaxStates = 2;

// Elements in one vector of the reference arithmetic. The last `numel % kReferenceLanes` elements
// of a span are its tail, where torch's kernels round one sum in another order (see rules/adam.h).
inline constexpr std::size_t kReferenceLanes = 8;

// Elements that share a scale in 8-bit states: docs/formats/moments_8bit.md.
inline constexpr std::size_t kBlockNumel = 256;

enum class WeightFormat : unsigned char { kFp32, kSplit };
enum class GradientFormat : unsigned char { kFp32, kBf16 };
enum class StateFormat : unsigned char { kFp32, k8Bit };

// What an update changes. As many states as the rule has, in one of the two formats: the first has a
// sign, the second are squares and have none.
struct Arrays {
  void* weight = nullptr;                // fp32, or bf16 when split.
  std::int16_t* residual = nullptr;      // Low half of the fp32 master; split only.
  float* states[kMaxStates] = {};        // fp32 states.
  std::uint8_t* codes[kMaxStates] = {};  // 8-bit states: one code per element,
  float* scales[kMaxStates] = {};        // and one scale per block of them.
};

// One tensor, or a part of one that starts at a multiple of kReferenceLanes elements (with 8-bit
// states, of kBlockNumel) and, unless it is the last part, ends at one. Arrays do not overlap, but
// an array of `to` may be that of `from`: then it is updated in place. Any alignment of their
// element is enough.
struct Span {
  Arrays from;  // Read.
  Arrays to;    // Written.
  const void* gradient = nullptr;  // fp32 or bf16; read only.
  std::size_t numel = 0;
};

// Elements [start, stop) of a span; `start` is a multiple as above. `is_last` when `stop`
// is the span's end.
using Kernel = void (*)(const Span& span, std::size_t start, std::size_t stop, bool is_last,
                        const float* coefficients, float gradient_scale);

}  // namespace infinity::update

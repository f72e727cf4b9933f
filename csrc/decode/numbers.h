// Conversions between formats of numbers, written so that a compiler can vectorise them.
//
// They round to nearest, ties to even; every NaN becomes the positive quiet one.
#pragma once

#include <cstdint>

#include "decode.h"

namespace infinity::decode {
namespace {

// Not std::bit_cast, of which the linker could keep a copy for another instruction set.
template <class To, class From>
To cast(From value) noexcept {
  return __builtin_bit_cast(To, value);
}

inline constexpr std::uint32_t kMagnitude = 0x7FFFFFFFU;
inline constexpr std::uint32_t kInfinity = 0x7F800000U;
inline constexpr std::uint32_t kNan = 0x7FC00000U;

struct Bf16 {
  using Bits = std::uint16_t;

  static Bits bits(float number) noexcept {
    const std::uint32_t from = cast<std::uint32_t>(number);
    const std::uint32_t rounded = (from + 0x7FFFU + ((from >> 16) & 1U)) >> 16;
    return static_cast<Bits>((from & kMagnitude) > kInfinity ? 0x7FC0U : rounded);
  }
  static float number(Bits bits) noexcept {
    return cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

struct Fp16 {
  using Bits = std::uint16_t;

  static Bits bits(float number) noexcept {
    const std::uint32_t from = cast<std::uint32_t>(number);
    const std::uint32_t magnitude = from & kMagnitude;
    const std::uint32_t sign = (from >> 16) & 0x8000U;
    // The last place of 0.5 is that of fp16's denormals, so the addition rounds to it.
    const float half = cast<float>(magnitude) + 0.5F;
    const std::uint32_t small = cast<std::uint32_t>(half) - 0x3F000000U;
    const std::uint32_t normal =
        (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
    std::uint32_t rounded = magnitude < 0x38800000U ? small : normal;
    rounded = magnitude >= 0x477FF000U ? 0x7C00U : rounded;
    return static_cast<Bits>(magnitude > kInfinity ? 0x7E00U : sign | rounded);
  }
  static float number(Bits bits) noexcept {
    const std::uint32_t magnitude = bits & 0x7FFFU;
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F;
    const std::uint32_t normal = (magnitude << 13) + (112U << 23);
    std::uint32_t wide = magnitude < 0x400U ? cast<std::uint32_t>(small) : normal;
    wide = magnitude >= 0x7C00U ? (magnitude << 13) | kInfinity : wide;
    return cast<float>(wide | sign);
  }
};

struct Fp32 {
  using Bits = float;

  static Bits bits(float number) noexcept {
    const std::uint32_t from = cast<std::uint32_t>(number);
    return cast<float>((from & kMagnitude) > kInfinity ? kNan : from);
  }
};

// E4M3 without infinities; 0x7F and 0xFF are NaN.
inline float fp8_number(std::uint8_t code) noexcept {
  const std::uint32_t magnitude = code & 0x7FU;
  const std::uint32_t sign = (code & 0x80U) << 24;
  const float small = static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9F;
  const std::uint32_t normal = (magnitude << 20) + (120U << 23);
  std::uint32_t wide = magnitude < 8 ? cast<std::uint32_t>(small) : normal;
  wide = magnitude == 0x7FU ? kNan : wide;
  return cast<float>(wide | sign);
}

// 2^(code - 127); 255 is NaN.
inline float e8m0_number(std::uint8_t code) noexcept {
  std::uint32_t bits = static_cast<std::uint32_t>(code) << 23;
  bits = code == 0 ? 0x00400000U : bits;
  return cast<float>(code == 255 ? kNan : bits);
}

template <class T>
T load(const std::uint8_t* array, std::size_t index) noexcept {
  T value;
  __builtin_memcpy(&value, array + index * sizeof value, sizeof value);
  return value;
}

inline float scale_at(const Job& job, std::size_t index) noexcept {
  switch (job.scale_format) {
    case ScaleFormat::kFp32:
      return load<float>(job.scales, index);
    case ScaleFormat::kBf16:
      return Bf16::number(load<std::uint16_t>(job.scales, index));
    case ScaleFormat::kFp16:
      return Fp16::number(load<std::uint16_t>(job.scales, index));
    case ScaleFormat::kE8m0:
      return e8m0_number(job.scales[index]);
    case ScaleFormat::kE4m3:
      return fp8_number(job.scales[index]);
  }
  return 0.0F;
}

// `numel` scales that lie one after the other.
inline void scales_at(const Job& job, std::size_t index, std::size_t numel,
                      float* __restrict out) noexcept {
  switch (job.scale_format) {
    case ScaleFormat::kBf16:
      for (std::size_t i = 0; i < numel; ++i) {
        out[i] = Bf16::number(load<std::uint16_t>(job.scales, index + i));
      }
      return;
    case ScaleFormat::kFp16:
      for (std::size_t i = 0; i < numel; ++i) {
        out[i] = Fp16::number(load<std::uint16_t>(job.scales, index + i));
      }
      return;
    default:
      for (std::size_t i = 0; i < numel; ++i) out[i] = scale_at(job, index + i);
  }
}

// Four nibbles, each in a byte of its own at every second place.
inline std::uint64_t spread(std::uint64_t nibbles) noexcept {
  nibbles = (nibbles | nibbles << 24) & 0x000000FF000000FFU;
  return (nibbles | nibbles << 12) & 0x000F000F000F000FU;
}

// The number of zero where none is stored.
inline std::uint8_t middle_of(const Job& job) noexcept {
  return static_cast<std::uint8_t>(1U << (job.packed.bits - 1));
}

// `numel` numbers of a row, from `column` on.
inline void unpack(const PackedMatrix& matrix, std::size_t row, std::size_t column,
                   std::size_t numel, std::uint8_t* __restrict out) noexcept {
  const unsigned bits = matrix.bits;
  const std::uint32_t mask = (1U << bits) - 1U;
  const std::uint32_t raised = matrix.raised;
  const std::size_t num_columns = matrix.num_columns;
  const std::uint8_t* __restrict words = matrix.words;
  if (matrix.packing == Packing::kBytes) {
    const std::uint8_t* __restrict from = words + row * num_columns + column;
    for (std::size_t i = 0; i < numel; ++i) out[i] = from[i] ^ 0x80U;
  } else if (matrix.packing == Packing::kColumns) {
    const std::uint8_t* __restrict from = words + 4 * (row * bits / 32 * num_columns + column);
    const unsigned shift = static_cast<unsigned>(row * bits % 32);
    for (std::size_t i = 0; i < numel; ++i) {
      const std::uint32_t word = load<std::uint32_t>(from, i) + raised;
      out[i] = static_cast<std::uint8_t>((word >> shift) & mask);
    }
    if (shift + bits <= 32) return;
    from += 4 * num_columns;
    for (std::size_t i = 0; i < numel; ++i) {
      const std::uint32_t word = load<std::uint32_t>(from, i) + raised;
      out[i] = static_cast<std::uint8_t>((out[i] | (word << (32 - shift))) & mask);
    }
  } else if (matrix.packing == Packing::kAwq) {
    constexpr unsigned kShifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};
    const std::uint8_t* __restrict from = words + 4 * (row * (num_columns / 8) + column / 8);
    const std::size_t skipped = column % 8;
    std::size_t i = 0;
    for (; skipped == 0 && i + 8 <= numel; i += 8) {
      const std::uint32_t word = load<std::uint32_t>(from, i / 8);
      const std::uint64_t eight = spread(word & 0xFFFFU) | spread(word >> 16) << 8;
      __builtin_memcpy(out + i, &eight, sizeof eight);
    }
    for (; i < numel; ++i) {
      const std::size_t at = skipped + i;
      const std::uint32_t word = load<std::uint32_t>(from, at / 8);
      out[i] = static_cast<std::uint8_t>((word >> kShifts[at % 8]) & 15U);
    }
  } else if (bits == 8 && raised == 0) {
    const std::uint8_t* __restrict from = words + row * ((num_columns + 3) / 4 * 4) + column;
    for (std::size_t i = 0; i < numel; ++i) out[i] = from[i];
  } else {
    const std::uint8_t* __restrict from = words + 4 * (row * ((num_columns * bits + 31) / 32));
    for (std::size_t i = 0; i < numel; ++i) {
      const std::size_t bit = (column + i) * bits;
      const unsigned shift = static_cast<unsigned>(bit % 32);
      std::uint32_t word = (load<std::uint32_t>(from, bit / 32) + raised) >> shift;
      if (shift + bits > 32) {
        word |= (load<std::uint32_t>(from, bit / 32 + 1) + raised) << (32 - shift);
      }
      out[i] = static_cast<std::uint8_t>(word & mask);
    }
  }
}

// The group of a row or column.
inline std::size_t group_of(const Job& job, std::size_t index) noexcept {
  if (job.order == nullptr) return index / job.group;
  const auto group = load<std::int32_t>(job.order, index);
  if (group < 0) return 0;
  return static_cast<std::size_t>(group) < job.num_groups ? static_cast<std::size_t>(group)
                                                          : job.num_groups - 1;
}

// The scale of a group of four-bit codes, which lie in one matrix.
inline float group_scale(const Job& job, std::size_t group, std::size_t matrix) noexcept {
  const float scale = scale_at(job, group);
  if (job.global_scales == nullptr) return scale;
  const float global = load<float>(job.global_scales, matrix);
  return job.is_divided ? scale / global : scale * global;
}

}  // namespace
}  // namespace infinity::decode

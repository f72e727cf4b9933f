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

inline float number_at(ScaleFormat format, const std::uint8_t* at) noexcept {
  switch (format) {
    case ScaleFormat::kFp32:
      return load<float>(at, 0);
    case ScaleFormat::kBf16:
      return Bf16::number(load<std::uint16_t>(at, 0));
    case ScaleFormat::kFp16:
      return Fp16::number(load<std::uint16_t>(at, 0));
    case ScaleFormat::kE8m0:
      return e8m0_number(*at);
    case ScaleFormat::kE4m3:
      return fp8_number(*at);
  }
  return 0.0F;
}

inline float scale_at(const Job& job, std::size_t index) noexcept {
  return number_at(job.scale_format, job.scales + index * job.scale_stride);
}

// `numel` numbers in the format of scales that lie one after the other.
inline void numbers_at(const Job& job, const std::uint8_t* numbers, std::size_t index,
                       std::size_t numel, float* __restrict out) noexcept {
  switch (job.scale_format) {
    case ScaleFormat::kBf16:
      for (std::size_t i = 0; i < numel; ++i) {
        out[i] = Bf16::number(load<std::uint16_t>(numbers, index + i));
      }
      return;
    case ScaleFormat::kFp16:
      for (std::size_t i = 0; i < numel; ++i) {
        out[i] = Fp16::number(load<std::uint16_t>(numbers, index + i));
      }
      return;
    default:
      for (std::size_t i = 0; i < numel; ++i) {
        out[i] = number_at(job.scale_format, numbers + (index + i) * job.scale_stride);
      }
  }
}

struct Pair {
  int scale, minimum;
};

// The small factors of a group.
inline Pair factors_of(Factors factors, const std::uint8_t* from, std::size_t group) noexcept {
  const auto part = [&](std::size_t at, std::size_t shift, int mask) {
    return (from[at] >> shift) & mask;
  };
  switch (factors) {
    case Factors::kNone:
      break;
    case Factors::kBytes:
      return {static_cast<std::int8_t>(from[group]), 0};
    case Factors::kNibbles:
      return {part(group, 0, 15), part(group, 4, 15)};
    case Factors::kSixPairs:  // Of the last four groups, the high bits are in other bytes.
      if (group < 4) return {part(group, 0, 63), part(group + 4, 0, 63)};
      return {part(group + 4, 0, 15) | part(group - 4, 2, 48),
              part(group + 4, 4, 15) | part(group, 2, 48)};
    case Factors::kSixSigned: {
      const int high = part(8 + group % 4, group / 4 * 2, 3);
      return {(part(group % 8, group / 8 * 4, 15) | high << 4) - 32, 0};
    }
    case Factors::kSixSplit: {
      const int high = part(group / 4, group % 4 * 2, 3);
      return {(part(2 + group / 2, group % 2 * 4, 15) | high << 4) - 32, 0};
    }
  }
  return {1, 1};
}

struct GroupNumbers {
  float scale, minimum;  // The minimum is subtracted.
};

inline GroupNumbers group_at(const Job& job, std::size_t index) noexcept {
  const std::size_t at = index / job.groups_of_scale * job.scale_stride;
  GroupNumbers of{number_at(job.scale_format, job.scales + at), 0.0F};
  if (job.minima != nullptr) of.minimum = number_at(job.scale_format, job.minima + at);
  if (job.factors != Factors::kNone) {
    const Pair factors =
        factors_of(job.factors, job.factors_at + at, index % job.groups_of_scale);
    of.scale *= static_cast<float>(factors.scale);
    if (job.minima != nullptr) of.minimum *= static_cast<float>(factors.minimum);
  }
  if (job.are_minima_added) of.minimum = -of.minimum;
  return of;
}

// Four nibbles, each in a byte of its own at every second place.
inline std::uint64_t spread(std::uint64_t nibbles) noexcept {
  nibbles = (nibbles | nibbles << 24) & 0x000000FF000000FFU;
  return (nibbles | nibbles << 12) & 0x000F000F000F000FU;
}

// Codes of a field, put into `codes`, or or-ed into them from bit `shift` on.
inline void add_field(const Field& field, const std::uint8_t* record, unsigned numel,
                      unsigned shift, std::uint8_t* __restrict codes) noexcept {
  const std::uint8_t* __restrict from = record + field.at;
  const unsigned mask = (1U << field.bits) - 1U;
  for (unsigned done = 0; done < numel; from += field.run) {
    for (unsigned bit = 0; bit < 8; bit += field.bits, done += field.run) {
      if (shift == 0) {
        for (unsigned i = 0; i < field.run; ++i) {
          const unsigned code = (static_cast<unsigned>(from[i]) >> bit) & mask;
          codes[done + i] = static_cast<std::uint8_t>(code);
        }
        continue;
      }
      for (unsigned i = 0; i < field.run; ++i) {
        const unsigned code = (static_cast<unsigned>(from[i]) >> bit) & mask;
        codes[done + i] = static_cast<std::uint8_t>(codes[done + i] | (code << shift));
      }
    }
  }
}

inline void unpack_record(const Record& record, const std::uint8_t* from,
                          std::uint8_t* __restrict codes) noexcept {
  add_field(record.low, from, record.numel, 0, codes);
  if (record.high.bits != 0) add_field(record.high, from, record.numel, record.low.bits, codes);
  if (record.low.bits != 8) return;
  for (unsigned i = 0; i < record.numel; ++i) codes[i] ^= 0x80U;  // Bytes are signed.
}

// Codes of a row of records, from `column` on.
inline void unpack_fields(const PackedMatrix& matrix, std::size_t row, std::size_t column,
                          std::size_t numel, std::uint8_t* __restrict out) noexcept {
  const Record& record = matrix.record;
  const std::size_t row_nbytes = matrix.num_columns / record.numel * record.nbytes;
  const std::uint8_t* from =
      matrix.words + row * row_nbytes + column / record.numel * record.nbytes;
  std::size_t skipped = column % record.numel;
  for (std::size_t done = 0; done < numel; from += record.nbytes) {
    const std::size_t left = record.numel - skipped;
    const std::size_t count = left < numel - done ? left : numel - done;
    if (count == record.numel) {
      unpack_record(record, from, out + done);
    } else {
      std::uint8_t codes[Record::kMaxNumel];
      unpack_record(record, from, codes);
      __builtin_memcpy(out + done, codes + skipped, count);
    }
    done += count;
    skipped = 0;
  }
}

// Numbers from the one of an index on. The first plane has the highest bits of all bytes.
inline void unpack_planes(const PackedMatrix& matrix, std::size_t index, std::size_t numel,
                          std::uint8_t* __restrict out) noexcept {
  const unsigned mask = (1U << matrix.bits) - 1U;
  for (std::size_t done = 0; done < numel;) {
    const std::size_t plane = (index + done) / matrix.plane, at = (index + done) % matrix.plane;
    const std::size_t left = matrix.plane - at;
    const std::size_t end = done + (left < numel - done ? left : numel - done);
    const unsigned shift = 8U - matrix.bits * static_cast<unsigned>(plane + 1);
    const std::uint8_t* __restrict from = matrix.words + at - done;
    for (; done < end; ++done) {
      out[done] = static_cast<std::uint8_t>((static_cast<unsigned>(from[done]) >> shift) & mask);
    }
  }
}

// `numel` numbers of a row, from `column` on.
inline void unpack(const PackedMatrix& matrix, std::size_t row, std::size_t column,
                   std::size_t numel, std::uint8_t* __restrict out) noexcept {
  const unsigned bits = matrix.bits;
  const std::uint32_t mask = (1U << bits) - 1U;
  const std::uint32_t raised = matrix.raised;
  const std::size_t num_columns = matrix.num_columns;
  const std::uint8_t* __restrict words = matrix.words;
  if (matrix.packing == Packing::kFields) {
    unpack_fields(matrix, row, column, numel, out);
  } else if (matrix.packing == Packing::kPlanes) {
    unpack_planes(matrix, row * num_columns + column, numel, out);
  } else if (matrix.packing == Packing::kBytes) {
    const std::uint8_t* __restrict from = words + row * num_columns + column;
    for (std::size_t i = 0; i < numel; ++i) out[i] = from[i] ^ matrix.flipped;
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
    for (i = 0; matrix.flipped != 0 && i < numel; ++i) out[i] ^= matrix.flipped;
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

// The decoding of blocks that hold codes, scales and minima: infinity/codecs/blocks.py.
#pragma once

#include "kernels.h"
#include "numbers.h"

namespace infinity::decode {
namespace {

// Codes of a field, or-ed into `codes` from bit `shift` on. A byte holds 8 / bits codes; the same
// bits of `run` bytes in a row are `run` codes in a row.
inline void add_field(const BlockField& field, const std::uint8_t* block, unsigned numel,
                      unsigned shift, std::uint8_t* __restrict codes) noexcept {
  const std::uint8_t* __restrict from = block + field.at;
  const unsigned mask = (1U << field.bits) - 1U;
  for (unsigned done = 0; done < numel; from += field.run) {
    for (unsigned bit = 0; bit < 8; bit += field.bits, done += field.run) {
      for (unsigned i = 0; i < field.run; ++i) {
        const unsigned code = (static_cast<unsigned>(from[i]) >> bit) & mask;
        codes[done + i] = static_cast<std::uint8_t>(codes[done + i] | (code << shift));
      }
    }
  }
}

struct GroupFactors {
  int scales[BlockLayout::kMaxGroups];
  int minima[BlockLayout::kMaxGroups];
};

// The small factors of a block's groups.
inline GroupFactors factors_of(const BlockLayout& layout, const std::uint8_t* block) noexcept {
  GroupFactors of;
  const std::uint8_t* from = block + layout.factors_at;
  switch (layout.factors) {
    case BlockFactors::kNone:
      of.scales[0] = of.minima[0] = 1;
      break;
    case BlockFactors::kBytes:
      for (int i = 0; i < 16; ++i) of.scales[i] = static_cast<std::int8_t>(from[i]);
      break;
    case BlockFactors::kNibbles:
      for (int i = 0; i < 16; ++i) {
        of.scales[i] = from[i] & 15;
        of.minima[i] = from[i] >> 4;
      }
      break;
    case BlockFactors::kSixPairs:  // Of the last four groups, the high bits are in other bytes.
      for (int i = 0; i < 4; ++i) {
        of.scales[i] = from[i] & 63;
        of.minima[i] = from[4 + i] & 63;
        of.scales[4 + i] = (from[8 + i] & 15) | ((from[i] >> 2) & 48);
        of.minima[4 + i] = (from[8 + i] >> 4) | ((from[4 + i] >> 2) & 48);
      }
      break;
    case BlockFactors::kSixSigned:
      for (int i = 0; i < 16; ++i) {
        const int low = (from[i % 8] >> (4 * (i / 8))) & 15;
        of.scales[i] = (low | (((from[8 + i % 4] >> (2 * (i / 4))) & 3) << 4)) - 32;
      }
      break;
    case BlockFactors::kSixSplit:
      for (int i = 0; i < 8; ++i) {
        const int low = (from[2 + i / 2] >> (4 * (i % 2))) & 15;
        of.scales[i] = (low | (((load<std::uint16_t>(from, 0) >> (2 * i)) & 3) << 4)) - 32;
      }
      break;
  }
  return of;
}

inline float half_at(const std::uint8_t* block, int at) noexcept {
  return Fp16::number(load<std::uint16_t>(block + at, 0));
}

inline void decode_block(const Job& job, const std::uint8_t* block,
                         float* __restrict numbers) noexcept {
  const BlockLayout& layout = job.block;
  std::uint8_t codes[BlockLayout::kMaxNumel] = {};
  add_field(layout.low, block, layout.numel, 0, codes);
  if (layout.high.bits != 0) add_field(layout.high, block, layout.numel, layout.low.bits, codes);
  const GroupFactors factors = factors_of(layout, block);
  const float scale = half_at(block, layout.scale_at);
  const float minimum = layout.minimum_at < 0 ? 0.0F : half_at(block, layout.minimum_at);
  const std::uint8_t flipped = layout.low.bits == 8 ? 0x80 : 0;  // Bytes are signed.
  for (unsigned first = 0, group = 0; first < layout.numel; first += layout.group, ++group) {
    const float step = scale * static_cast<float>(factors.scales[group]);
    float lowest = 0.0F;
    if (layout.minimum_at >= 0) lowest = minimum * static_cast<float>(factors.minima[group]);
    if (layout.is_minimum_added) lowest = -lowest;
    for (unsigned i = first; i < first + layout.group; ++i) {
      const float number = layout.has_values
                               ? job.values[codes[i]]
                               : static_cast<float>(static_cast<int>(codes[i] ^ flipped) -
                                                    layout.zero);
      numbers[i] = step * number - lowest;
    }
  }
}

template <class Out>
void block_row(const Job& job, std::size_t row, std::size_t column, std::size_t numel, void* out) {
  auto* __restrict elements = static_cast<typename Out::Bits*>(out);
  const std::size_t size = job.block.numel;
  const std::uint8_t* blocks = job.codes + row * (job.num_columns / size) * job.block.nbytes;
  float numbers[BlockLayout::kMaxNumel];
  for (std::size_t at = column; at < column + numel;) {
    const std::size_t begin = at % size;
    const std::size_t end = begin + numel - (at - column) < size ? begin + numel - (at - column)
                                                                 : size;
    decode_block(job, blocks + at / size * job.block.nbytes, numbers);
    for (std::size_t i = begin; i < end; ++i) *elements++ = Out::bits(numbers[i]);
    at += end - begin;
  }
}

}  // namespace
}  // namespace infinity::decode

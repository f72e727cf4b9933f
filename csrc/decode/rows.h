// The decoding of one row; `Lookup` of an instruction set turns four-bit codes into elements.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "numbers.h"

namespace infinity::decode {
namespace {

inline std::size_t smaller(std::size_t a, std::size_t b) noexcept { return a < b ? a : b; }

template <class Out>
void fp8_span(const std::uint8_t* __restrict codes, std::size_t numel, float scale,
              typename Out::Bits* __restrict out) noexcept {
  for (std::size_t i = 0; i < numel; ++i) out[i] = Out::bits(fp8_number(codes[i]) * scale);
}

template <class Out>
void fp8_row(const Job& job, std::size_t row, std::size_t column, std::size_t numel, void* out) {
  auto* elements = static_cast<typename Out::Bits*>(out);
  const std::uint8_t* codes = job.codes + row * job.num_columns;
  const std::size_t grid_rows = (job.num_rows + job.block_rows - 1) / job.block_rows;
  const std::size_t grid_columns = (job.num_columns + job.block_columns - 1) / job.block_columns;
  const std::size_t grid_row = row / job.num_rows * grid_rows + row % job.num_rows / job.block_rows;
  const std::size_t stop = column + numel;
  while (column < stop) {
    const std::size_t block = column / job.block_columns;
    const std::size_t next = smaller(stop, (block + 1) * job.block_columns);
    const float scale = scale_at(job, grid_row * grid_columns + block);
    fp8_span<Out>(codes + column, next - column, scale, elements);
    elements += next - column;
    column = next;
  }
}

// The 16 elements that codes of one scale stand for.
template <class Product, class Out>
inline constexpr bool kIsRoundedOnce =
    std::is_same_v<Product, Fp32> || std::is_same_v<Product, Out>;

template <class Product>
float narrowed(float number) noexcept {
  if constexpr (std::is_same_v<Product, Fp32>) {
    return number;
  } else {
    return Product::number(Product::bits(number));
  }
}

template <class Product, class Out>
typename Out::Bits rounded_twice(float product) noexcept {
  if constexpr (kIsRoundedOnce<Product, Out>) {
    return Out::bits(product);
  } else {
    return Out::bits(narrowed<Product>(product));
  }
}

template <class Product, class Out>
struct Table {
  alignas(64) typename Out::Bits elements[16];

  Table(const float* values, float scale) noexcept {
    for (int i = 0; i < 16; ++i) {
      elements[i] = rounded_twice<Product, Out>(values[i] * scale);
    }
  }
};

// Which half of a byte holds the first of its two codes.
inline bool is_high_first(const Job& job) noexcept { return job.packed.packing == Packing::kPairs; }

template <class Product, class Out>
typename Out::Bits element_at(const Job& job, const float* values, float scale,
                              std::size_t index) noexcept {
  const bool is_high = (index % 2 == 0) == is_high_first(job);
  const std::uint8_t pair = job.codes[index / 2];
  return Table<Product, Out>(values, scale).elements[is_high ? pair >> 4 : pair & 15];
}

template <class Lookup, class Product, class Out>
void four_bit_row(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                  void* out) {
  auto* elements = static_cast<typename Out::Bits*>(out);
  std::size_t index = row * job.num_columns + column;
  const std::size_t stop = index + numel;
  std::size_t group = index / job.group;
  for (std::size_t end = (group + 1) * job.group; index < stop; ++group, end += job.group) {
    const std::size_t next = smaller(stop, end);
    float scale = group_scale(job, group, row / job.num_rows);
    const float* values = job.values;
    float own[16];
    if (job.zeros.words != nullptr) {
      std::uint8_t zero = 0;
      unpack(job.zeros, row, group % job.zeros.num_columns, 1, &zero);
      for (int i = 0; i < 16; ++i) own[i] = static_cast<float>(i - zero);
      values = own;
    }
    if (job.minima != nullptr) {
      const float minimum = group_at(job, group).minimum;
      for (int i = 0; i < 16; ++i) {
        own[i] = narrowed<Product>(narrowed<Product>(values[i] * scale) - minimum);
      }
      values = own;
      scale = 1.0F;
    }
    if (index % 2 != 0) {
      *elements++ = element_at<Product, Out>(job, values, scale, index++);
    }
    const std::size_t taken = Lookup::template pairs<Product, Out>(
        values, scale, job.codes + index / 2, next - index, is_high_first(job), elements);
    index += taken;
    elements += taken;
    if (index < next) *elements++ = element_at<Product, Out>(job, values, scale, index++);
  }
}

// The numbers of the groups of some columns.
struct GroupSpan {
  static constexpr std::size_t kNumel = 256;
  float scales[kNumel];
  float zeros[kNumel];
  float minima[kNumel];
};

// Zeros of a row of them.
inline void load_zeros(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                       float* __restrict out) noexcept {
  if (job.zeros.packing == Packing::kFloats) {
    numbers_at(job, job.zeros.words, row * job.zeros.num_columns + column, numel, out);
    return;
  }
  std::uint8_t zeros[GroupSpan::kNumel];
  unpack(job.zeros, row, column, numel, zeros);
  for (std::size_t i = 0; i < numel; ++i) out[i] = static_cast<float>(zeros[i]);
}

// Those of a row whose groups lie across it. Zeros and minima stay as they are where none are
// stored.
inline void load_across(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                        GroupSpan& span) noexcept {
  for (std::size_t i = 0; i < numel;) {
    const std::size_t group = group_of(job, column + i);
    const std::size_t next = (group + 1) * job.group - column;
    const std::size_t end = job.order != nullptr ? i + 1 : smaller(numel, next);
    const GroupNumbers of = group_at(job, row * job.num_groups + group);
    for (std::size_t at = i; at < end; ++at) span.scales[at] = of.scale;
    for (std::size_t at = i; job.minima != nullptr && at < end; ++at) span.minima[at] = of.minimum;
    if (job.zeros.words != nullptr) {
      float zero = 0.0F;
      load_zeros(job, row, group, 1, &zero);
      for (std::size_t at = i; at < end; ++at) span.zeros[at] = zero;
    }
    i = end;
  }
}

// Those of a group of rows.
inline void load_down(const Job& job, std::size_t group, std::size_t column, std::size_t numel,
                      GroupSpan& span) noexcept {
  numbers_at(job, job.scales, group * job.num_columns + column, numel, span.scales);
  if (job.zeros.words != nullptr) load_zeros(job, group, column, numel, span.zeros);
}

// Elements of numbers whose groups are known.
template <class Product, class Out>
void finish(const Job& job, const float* __restrict numbers, const GroupSpan& span,
            std::size_t numel, typename Out::Bits* __restrict out) noexcept {
  if (job.minima == nullptr && job.times == 1.0F) {
    for (std::size_t i = 0; i < numel; ++i) {
      out[i] = rounded_twice<Product, Out>(numbers[i] * span.scales[i]);
    }
    return;
  }
  for (std::size_t i = 0; i < numel; ++i) {
    const float product =
        narrowed<Product>(narrowed<Product>(numbers[i] * span.scales[i]) * job.times);
    out[i] = rounded_twice<Product, Out>(product - span.minima[i]);
  }
}

template <class Product, class Out>
void affine_rows(const Job& job, std::size_t row, std::size_t num_rows, std::size_t column,
                 std::size_t numel, void* out, std::ptrdiff_t stride) {
  GroupSpan span;
  std::uint8_t codes[GroupSpan::kNumel];
  float numbers[GroupSpan::kNumel];
  const bool has_floats = job.zeros.packing == Packing::kFloats;
  for (float& zero : span.zeros) zero = static_cast<float>(job.zero);
  for (float& minimum : span.minima) minimum = 0.0F;
  for (std::size_t done = 0; done < numel; done += GroupSpan::kNumel) {
    const std::size_t first = column + done;
    const std::size_t count = smaller(GroupSpan::kNumel, numel - done);
    std::size_t loaded = job.num_groups;
    for (std::size_t r = 0; r < num_rows; ++r) {
      unpack(job.packed, row + r, first, count, codes);
      if (!job.are_groups_down) {
        load_across(job, row + r, first, count, span);
      } else if (const std::size_t group = group_of(job, row + r); group != loaded) {
        load_down(job, group, first, count, span);
        loaded = group;
      }
      for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<float>(codes[i]) - span.zeros[i];
      }
      for (std::size_t i = 0; has_floats && i < count; ++i) {
        numbers[i] = narrowed<Product>(numbers[i]);
      }
      for (std::size_t i = 0; job.has_values && i < count; ++i) numbers[i] = job.values[codes[i]];
      finish<Product, Out>(job, numbers, span, count,
                           static_cast<typename Out::Bits*>(out) +
                               static_cast<std::ptrdiff_t>(r) * stride +
                               static_cast<std::ptrdiff_t>(done));
    }
  }
}

using RowKernel = void (*)(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                           void* out);

template <class Out, RowKernel kRow>
void each_row(const Job& job, std::size_t row, std::size_t num_rows, std::size_t column,
              std::size_t numel, void* out, std::ptrdiff_t stride) {
  for (std::size_t r = 0; r < num_rows; ++r) {
    kRow(job, row + r, column, numel,
         static_cast<typename Out::Bits*>(out) + static_cast<std::ptrdiff_t>(r) * stride);
  }
}

// Looks up one element at a time.
struct ScalarLookup {
  // Decodes the pairs among `numel` codes, from the start of a byte on. Returns how many codes.
  template <class Product, class Out>
  static std::size_t pairs(const float* values, float scale, const std::uint8_t* codes,
                           std::size_t numel, bool is_high_first,
                           typename Out::Bits* out) noexcept {
    const Table<Product, Out> table(values, scale);
    const int first = is_high_first ? 4 : 0;
    for (std::size_t i = 0; i < numel / 2; ++i) {
      out[2 * i] = table.elements[(codes[i] >> first) & 15];
      out[2 * i + 1] = table.elements[(codes[i] >> (4 - first)) & 15];
    }
    return numel / 2 * 2;
  }
};

template <class Lookup, class Product, class Out>
inline constexpr RowsKernel kFourBits = &each_row<Out, &four_bit_row<Lookup, Product, Out>>;

template <class Lookup>
constexpr KernelTable table_of() noexcept {
  return {{&each_row<Bf16, &fp8_row<Bf16>>, &each_row<Fp16, &fp8_row<Fp16>>,
           &each_row<Fp32, &fp8_row<Fp32>>},
          {{kFourBits<Lookup, Bf16, Bf16>, kFourBits<Lookup, Bf16, Fp16>,
            kFourBits<Lookup, Bf16, Fp32>},
           {kFourBits<Lookup, Fp16, Bf16>, kFourBits<Lookup, Fp16, Fp16>,
            kFourBits<Lookup, Fp16, Fp32>},
           {kFourBits<Lookup, Fp32, Bf16>, kFourBits<Lookup, Fp32, Fp16>,
            kFourBits<Lookup, Fp32, Fp32>}},
          {{&affine_rows<Bf16, Bf16>, &affine_rows<Bf16, Fp16>, &affine_rows<Bf16, Fp32>},
           {&affine_rows<Fp16, Bf16>, &affine_rows<Fp16, Fp16>, &affine_rows<Fp16, Fp32>},
           {&affine_rows<Fp32, Bf16>, &affine_rows<Fp32, Fp16>, &affine_rows<Fp32, Fp32>}}};
}

}  // namespace
}  // namespace infinity::decode

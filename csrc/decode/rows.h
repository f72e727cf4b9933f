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

template <class Product, class Out>
struct Table {
  alignas(64) typename Out::Bits elements[16];

  Table(const float* values, float scale) noexcept {
    for (int i = 0; i < 16; ++i) {
      const float product = values[i] * scale;
      if constexpr (kIsRoundedOnce<Product, Out>) {
        elements[i] = Out::bits(product);
      } else {
        elements[i] = Out::bits(Product::number(Product::bits(product)));
      }
    }
  }
};

template <class Product, class Out>
typename Out::Bits element_at(const Job& job, float scale, std::size_t index) noexcept {
  const bool is_high = (index % 2 == 0) == job.is_high_first;
  const std::uint8_t pair = job.codes[index / 2];
  return Table<Product, Out>(job.values, scale).elements[is_high ? pair >> 4 : pair & 15];
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
    const float scale = group_scale(job, group, row / job.num_rows);
    if (index % 2 != 0) {
      *elements++ = element_at<Product, Out>(job, scale, index++);
    }
    const std::size_t taken = Lookup::template pairs<Product, Out>(
        job.values, scale, job.codes + index / 2, next - index, job.is_high_first, elements);
    index += taken;
    elements += taken;
    if (index < next) *elements++ = element_at<Product, Out>(job, scale, index++);
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

template <class Lookup>
constexpr KernelTable table_of() noexcept {
  return {{&fp8_row<Bf16>, &fp8_row<Fp16>, &fp8_row<Fp32>},
          {{&four_bit_row<Lookup, Bf16, Bf16>, &four_bit_row<Lookup, Bf16, Fp16>,
            &four_bit_row<Lookup, Bf16, Fp32>},
           {&four_bit_row<Lookup, Fp16, Bf16>, &four_bit_row<Lookup, Fp16, Fp16>,
            &four_bit_row<Lookup, Fp16, Fp32>},
           {&four_bit_row<Lookup, Fp32, Bf16>, &four_bit_row<Lookup, Fp32, Fp16>,
            &four_bit_row<Lookup, Fp32, Fp32>}}};
}

}  // namespace
}  // namespace infinity::decode

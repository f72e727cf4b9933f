// The decoding of one row, for every instruction set: `Lookup` says how 16 codes become elements.
#pragma once

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
template <class Out>
struct Table {
  alignas(64) typename Out::Bits elements[64 / sizeof(typename Out::Bits)];  // 16 are used.

  Table(const Job& job, float scale) noexcept {
    switch (job.product_format) {
      case FloatFormat::kFp32:
        for (int i = 0; i < 16; ++i) elements[i] = Out::bits(job.values[i] * scale);
        break;
      case FloatFormat::kBf16:
        for (int i = 0; i < 16; ++i) {
          elements[i] = Out::bits(Bf16::number(Bf16::bits(job.values[i] * scale)));
        }
        break;
      case FloatFormat::kFp16:
        for (int i = 0; i < 16; ++i) {
          elements[i] = Out::bits(Fp16::number(Fp16::bits(job.values[i] * scale)));
        }
        break;
    }
  }
};

inline std::size_t code_at(const std::uint8_t* codes, std::size_t index,
                           bool is_high_first) noexcept {
  const bool is_high = (index % 2 == 0) == is_high_first;
  return is_high ? codes[index / 2] >> 4 : codes[index / 2] & 15U;
}

template <class Lookup, class Out>
void four_bit_row(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                  void* out) {
  auto* elements = static_cast<typename Out::Bits*>(out);
  std::size_t index = row * job.num_columns + column;
  const std::size_t stop = index + numel;
  while (index < stop) {
    const std::size_t group = index / job.group;
    const std::size_t next = smaller(stop, (group + 1) * job.group);
    const auto table = Lookup::template table<Out>(job, scale_at(job, group));
    if (index % 2 != 0) {
      *elements++ = Lookup::template element<Out>(table, code_at(job.codes, index++,
                                                                 job.is_high_first));
    }
    const std::size_t taken =
        Lookup::template pairs<Out>(table, job.codes + index / 2, next - index, job.is_high_first,
                                    elements);
    index += taken;
    elements += taken;
    for (; index < next; ++index) {
      *elements++ = Lookup::template element<Out>(table, code_at(job.codes, index,
                                                                 job.is_high_first));
    }
  }
}

// One element at a time.
struct ScalarLookup {
  template <class Out>
  static Table<Out> table(const Job& job, float scale) noexcept {
    return Table<Out>(job, scale);
  }
  template <class Out>
  static typename Out::Bits element(const Table<Out>& table, std::size_t code) noexcept {
    return table.elements[code];
  }
  // Looks up codes from the start of a byte on, at most `numel`. Returns how many.
  template <class Out>
  static std::size_t pairs(const Table<Out>& table, const std::uint8_t* codes, std::size_t numel,
                           bool is_high_first, typename Out::Bits* out) noexcept {
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
          {&four_bit_row<Lookup, Bf16>, &four_bit_row<Lookup, Fp16>, &four_bit_row<Lookup, Fp32>}};
}

}  // namespace
}  // namespace infinity::decode

// Quantised weights to floating-point ones: docs/formats/quantized.md. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace infinity::decode {

enum class CodeFormat : unsigned char { kFp8, kFourBits, kAffine };
enum class ScaleFormat : unsigned char { kFp32, kBf16, kFp16, kE8m0, kE4m3 };
enum class FloatFormat : unsigned char { kBf16, kFp16, kFp32 };

// How a matrix of small numbers lies in 32-bit words: infinity/codecs/packing.py.
enum class Packing : unsigned char { kRows, kColumns, kAwq, kBytes };

struct PackedMatrix {
  const std::uint8_t* words = nullptr;
  Packing packing = Packing::kRows;
  unsigned bits = 4;
  std::size_t num_columns = 0;
  std::uint32_t raised = 0;  // Added to every word.
};

// One weight: matrices of rows of columns. Codes and scales may lie at any address; the output at a
// multiple of its element. Codes have row-major order without gaps.
struct Job {
  CodeFormat code_format = CodeFormat::kFp8;
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  ScaleFormat scale_format = ScaleFormat::kFp32;
  std::size_t num_matrices = 0;
  std::size_t num_rows = 0;
  std::size_t num_columns = 0;

  // FP8: a scale per block of a matrix; the last blocks may be short.
  std::size_t block_rows = 1;
  std::size_t block_columns = 1;

  // Four bits: a scale per `group` codes, counted from the first code of all, times the fp32 global
  // scale of its matrix or divided by it, if there are such. The product of a value and a scale is
  // rounded to `product_format`, then to the format of the output.
  std::size_t group = 1;
  const std::uint8_t* global_scales = nullptr;
  bool is_divided = false;
  bool is_high_first = false;  // Which half of a byte holds the first of its two codes.
  float values[16] = {};
  FloatFormat product_format = FloatFormat::kFp32;

  // Four bits and affine: a zero per group, subtracted from the code; none if `words` is null. Four
  // bits have groups x rows of them, affine as many as scales.
  PackedMatrix zeros;

  // Affine: (code - zero) * scale, rounded as four bits. Groups are of `group` columns, or of rows,
  // or each row or column has a number of `order`, I32.
  PackedMatrix packed;
  bool are_groups_down = false;
  std::size_t num_groups = 0;
  const std::uint8_t* order = nullptr;

  void* out = nullptr;
  FloatFormat out_format = FloatFormat::kBf16;
  std::ptrdiff_t matrix_stride = 0;  // In elements; no two elements may share an address.
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t column_stride = 1;
};

// Decodes on at most `num_threads` threads, one of which is the caller's. Neither their number nor
// the instruction set changes a bit, nor does the caller's rounding mode. `simd` is a name of
// update::instruction_sets(); one for which there are no kernels here gets the scalar ones.
void run(const Job& job, std::size_t num_threads, std::string_view simd);

}  // namespace infinity::decode

// Quantised weights to floating-point ones: docs/formats/quantized.md. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace infinity::decode {

enum class CodeFormat : unsigned char { kFp8, kFourBits, kAffine, kBlocks };
enum class ScaleFormat : unsigned char { kFp32, kBf16, kFp16, kE8m0, kE4m3 };
enum class FloatFormat : unsigned char { kBf16, kFp16, kFp32 };

// How a matrix of small numbers lies in 32-bit words: infinity/codecs/packing.py.
enum class Packing : unsigned char { kRows, kColumns, kAwq, kBytes, kPairs };

struct PackedMatrix {
  const std::uint8_t* words = nullptr;
  Packing packing = Packing::kRows;
  unsigned bits = 4;
  std::size_t num_columns = 0;
  std::uint32_t raised = 0;  // Added to every word.
};

// A field of codes in a block: `bits` of 1, 2, 4 or 8, from byte `at` on. The same bits of `run`
// bytes in a row are codes in a row.
struct BlockField {
  unsigned at = 0, bits = 0, run = 1;
};

// How the small factors of a block's groups are stored: infinity/codecs/blocks.py.
enum class BlockFactors : unsigned char {
  kNone, kBytes, kNibbles, kSixPairs, kSixSigned, kSixSplit
};

// A block of `numel` codes of one row, with an fp16 scale, perhaps an fp16 minimum, and perhaps a
// small factor of them for each group of codes.
struct BlockLayout {
  static constexpr unsigned kMaxNumel = 256;
  static constexpr unsigned kMaxGroups = 16;
  unsigned numel = 0, nbytes = 0, group = 0;
  BlockField low, high;  // High bits of a code stand above its low ones; none if `bits` is 0.
  int scale_at = 0, minimum_at = -1;
  BlockFactors factors = BlockFactors::kNone;
  unsigned factors_at = 0;
  int zero = 0;
  bool is_minimum_added = false;
  bool has_values = false;  // A code stands for a number of `values`.
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

  // Blocks: (code - zero or a value) * scale - minimum, in fp32; scales are in the codes.
  BlockLayout block;

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

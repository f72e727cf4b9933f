// Quantised weights to floating-point ones: docs/formats/quantized.md. No torch, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace infinity::decode {

enum class CodeFormat : unsigned char { kFp8, kFourBits, kAffine };
enum class ScaleFormat : unsigned char { kFp32, kBf16, kFp16, kE8m0, kE4m3 };
enum class FloatFormat : unsigned char { kBf16, kFp16, kFp32 };

// How a matrix of small numbers lies in 32-bit words or in bytes: infinity/codecs/packing.py.
enum class Packing : unsigned char {
  kRows, kColumns, kAwq, kBytes, kPairs, kPlanes, kFields, kFloats
};

// A field of the codes of a record: `bits` of 1, 2, 4 or 8, from byte `at` on. The same bits of
// `run` bytes in a row are codes in a row.
struct Field {
  unsigned at = 0, bits = 0, run = 1;
};

// Packing of kFields: `numel` codes of a row lie in `nbytes` bytes, with other numbers.
struct Record {
  static constexpr unsigned kMaxNumel = 256;
  unsigned numel = 0, nbytes = 0;
  Field low, high;  // High bits of a code stand above its low ones; none if `bits` is 0.
};

struct PackedMatrix {
  const std::uint8_t* words = nullptr;
  Packing packing = Packing::kRows;
  unsigned bits = 4;
  std::size_t num_columns = 0;
  std::uint32_t raised = 0;  // Added to every word.
  std::uint8_t flipped = 0;  // Bits of every number that are stored inverted.
  std::size_t plane = 1;     // Packing of kPlanes: numbers that have the same bits of their bytes.
  Record record;
};

// How small factors of scales and minima are stored: infinity/codecs/records.py.
enum class Factors : unsigned char { kNone, kBytes, kNibbles, kSixPairs, kSixSigned, kSixSplit };

// One weight: matrices of rows of columns. Codes and scales may lie at any address; the output at a
// multiple of its element.
struct Job {
  CodeFormat code_format = CodeFormat::kFp8;
  const std::uint8_t* codes = nullptr;
  const std::uint8_t* scales = nullptr;
  ScaleFormat scale_format = ScaleFormat::kFp32;
  std::size_t scale_stride = 4;  // In bytes, from one scale to the next.
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

  // Four bits and affine: a zero per group, subtracted from the code; if `words` is null, `zero` is
  // that of all. Four bits have groups x rows of them, affine as many as scales.
  PackedMatrix zeros;
  std::uint8_t zero = 0;

  // Affine: (code - zero, or its value) * scale * `times` less the minimum of the group, each
  // operation rounded as four bits. Zeros of kFloats have the format of scales. Groups are of
  // `group` columns, or of rows, or each row or column has a number of `order`, I32.
  PackedMatrix packed;
  bool has_values = false;  // A code of four bits stands for a number of `values`.
  bool are_groups_down = false;
  std::size_t num_groups = 0;
  const std::uint8_t* order = nullptr;
  const std::uint8_t* minima = nullptr;  // Format and stride are those of scales.
  bool are_minima_added = false;
  float times = 1.0F;

  // Affine: `groups_of_scale` groups have one scale and one minimum, times factors of each group.
  Factors factors = Factors::kNone;
  const std::uint8_t* factors_at = nullptr;  // Those of the first scale, whose stride they have.
  std::size_t groups_of_scale = 1;

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

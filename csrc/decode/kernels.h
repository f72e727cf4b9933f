// The table of kernels of one instruction set. As in update/kernels.h, everything with code in it
// is in unnamed namespaces.
#pragma once

#include "decode.h"

namespace infinity::decode {

// Decodes `numel` columns from `column` on of rows of one matrix, which are counted over all
// matrices, to contiguous elements of the output's format; its rows are `stride` elements apart.
using RowsKernel = void (*)(const Job& job, std::size_t row, std::size_t num_rows,
                            std::size_t column, std::size_t numel, void* out,
                            std::ptrdiff_t stride);

struct KernelTable {
  RowsKernel fp8[3];           // By FloatFormat of the output;
  RowsKernel four_bits[3][3];  // by that of the product, then by that of the output;
  RowsKernel affine[3][3];     // as these.
};

// A table of null pointers where the compiler could not build for the instruction set.
[[nodiscard]] KernelTable scalar_kernels() noexcept;
[[nodiscard]] KernelTable avx2_kernels() noexcept;
[[nodiscard]] KernelTable avx512_kernels() noexcept;

}  // namespace infinity::decode

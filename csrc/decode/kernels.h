// The table of kernels of one instruction set. As in update/kernels.h, everything with code in it
// is in unnamed namespaces.
#pragma once

#include "decode.h"

namespace infinity::decode {

// Decodes `numel` columns from `column` on of one row, counted over all matrices, to contiguous
// elements of the output's format.
using RowKernel = void (*)(const Job& job, std::size_t row, std::size_t column, std::size_t numel,
                           void* out);

struct KernelTable {
  RowKernel fp8[3];           // By FloatFormat of the output;
  RowKernel four_bits[3][3];  // by that of the product, then by that of the output.
};

// A table of null pointers where the compiler could not build for the instruction set.
[[nodiscard]] KernelTable scalar_kernels() noexcept;
[[nodiscard]] KernelTable avx2_kernels() noexcept;
[[nodiscard]] KernelTable avx512_kernels() noexcept;

}  // namespace infinity::decode

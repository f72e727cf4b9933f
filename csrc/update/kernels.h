// The table of kernels of one instruction set: what each kernels_*.cpp compiles for its own.
//
// Everything with code in it is in unnamed namespaces: were it shared between these files, the
// linker could keep the copy that only the newest processor can run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "span.h"

namespace infinity::update {

struct RuleKernels {
  const char* name;
  std::size_t num_states;
  std::size_t num_coefficients;
  Kernel kernels[2][2][2];  // By StateFormat, WeightFormat, GradientFormat.
};

// The norm of bf16 numbers, by how products are rounded before they are added (norm.h).
using NormKernel = float (*)(const std::uint16_t* values, std::size_t numel);
using NormKernels = std::array<NormKernel, 8>;

struct KernelTable {
  const RuleKernels* rules;
  std::size_t num_rules;
  NormKernels norms = {};
};

// A null table where the compiler could not build for the instruction set.
[[nodiscard]] KernelTable scalar_kernels() noexcept;
[[nodiscard]] KernelTable avx2_kernels() noexcept;
[[nodiscard]] KernelTable avx512_kernels() noexcept;
[[nodiscard]] KernelTable neon_kernels() noexcept;

}  // namespace infinity::update

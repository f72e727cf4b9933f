// The 2-norm of bf16 numbers, with the bits of torch's for the same numbers in fp32: one sum for each
// lane of a vector, in the order of memory, then the lanes in their order, then what is left.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "lanes_scalar.h"

namespace infinity::update {
namespace {

// Compilers fuse a product with the sum that it is added to, or do not: it is torch's that counts.
template <class L, bool kFused>
typename L::Float add_square(typename L::Float sum, typename L::Float value) {
  if constexpr (kFused) return L::fma(value, value, sum);
  return L::add(sum, L::mul(value, value));
}

// Of the elements that are left torch's may make kGroup products at a time, which it cannot fuse.
template <class L, bool kFused, std::size_t kGroup>
float norm_of_bf16(const std::uint16_t* values, std::size_t numel) {
  auto sum = L::broadcast(0.0F);
  std::size_t i = 0;
  for (; i + L::kCount <= numel; i += L::kCount) {
    sum = add_square<L, kFused>(sum, L::load_bf16(values + i));
  }
  float lanes[L::kCount];
  L::store(lanes, sum);
  float total = lanes[0];
  for (std::size_t lane = 1; lane < L::kCount; ++lane) total += lanes[lane];
  for (const std::size_t end = numel - (numel - i) % kGroup; i < end; ++i) {
    total = add_square<ScalarLanes, false>(total, ScalarLanes::load_bf16(values + i));
  }
  for (; i < numel; ++i) {
    total = add_square<ScalarLanes, true>(total, ScalarLanes::load_bf16(values + i));
  }
  return std::sqrt(total);
}

template <class L>
constexpr NormKernels norms_of() {
  return {&norm_of_bf16<L, false, 1>, &norm_of_bf16<L, false, 4>, &norm_of_bf16<L, false, 8>,
          &norm_of_bf16<L, false, 16>, &norm_of_bf16<L, true, 1>, &norm_of_bf16<L, true, 4>,
          &norm_of_bf16<L, true, 8>, &norm_of_bf16<L, true, 16>};
}

}  // namespace
}  // namespace infinity::update

// Sums, products and copies of flat arrays: gradients of ranks, of a device, of several backwards.
#pragma once

#include <cstddef>

#include "span.h"

namespace infinity::update {

// They run on at most `num_threads` threads of the process's pool, and block. Each element is
// rounded once, so the bits do not depend on the threads. Arrays are one and the same, or apart.

// total[i] += term[i]
void add(float* total, const void* term, GradientFormat format, std::size_t numel,
         std::size_t num_threads);

// product[i] = values[i] * factor
void multiply(float* product, const void* values, GradientFormat format, float factor,
              std::size_t numel, std::size_t num_threads);

void copy(void* target, const void* source, std::size_t nbytes, std::size_t num_threads);

}  // namespace infinity::update

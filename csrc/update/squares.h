// Sums of the squares of gradients, for their norms.
#pragma once

#include <cstddef>

namespace infinity::update {

inline constexpr std::size_t kSquaresNumel = 2048;  // Elements of a sum.

// sums[i] gets the sum in fp64 of the squares of the i-th kSquaresNumel elements; the last sum may
// have fewer. Each is a tree, whose every level adds the second half of the terms to the first, so
// its bits depend on its own elements alone. On at most `num_threads` threads of the process's
// pool. Blocks.
void sum_squares(const float* values, std::size_t numel, double* sums, std::size_t num_threads);

}  // namespace infinity::update

// Sums of the squares of gradients, for their norms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinity::update {

inline constexpr std::size_t kSquaresNumel = 2048;  // Elements of a sum.

// sums[i] gets the sum in fp64 of the squares of the i-th kSquaresNumel elements; the last sum may
// have fewer. Each is a tree, whose every level adds the second half of the terms to the first, so
// its bits depend on its own elements alone. On at most `num_threads` threads of the process's
// pool. Blocks.
void sum_squares(const float* values, std::size_t numel, double* sums, std::size_t num_threads);

// A binary tree over the blocks of a tensor: the node of a level above another one is the sum of
// its two halves in their order, or the only half that has blocks of the tensor. Its bits do not
// depend on which rank sums which blocks. A run of blocks is kept as its roots: the sums of the largest
// aligned subtrees that it is made of, in their order.

// The roots of the blocks from `first` on, whose sums are `sums`.
std::vector<double> roots_of(const double* sums, std::size_t count, std::uint64_t first);

// How many roots the blocks [first, last) have.
std::size_t num_roots(std::uint64_t first, std::uint64_t last);

// The sum of all blocks [bounds[0], bounds[num_runs]), from the roots of the runs
// [bounds[i], bounds[i + 1]), one behind the other. 0 without blocks.
double tree_sum(const double* roots, const std::uint64_t* bounds, std::size_t num_runs);

}  // namespace infinity::update

#include "squares.h"

#include <algorithm>
#include <array>
#include <bit>

#include "float_environment.h"
#include "thread_pool.h"

namespace infinity::update {

namespace {

// What a thread takes at a time: 2 MiB, some hundreds of microseconds.
constexpr std::size_t kItemBlocks = 256;

using Block = std::array<double, kSquaresNumel>;

// The square of an fp32 number is exact in fp64: it does not matter whether the compiler fuses it
// with an addition.
double tree_of(const float* values, Block& terms) {
  for (std::size_t i = 0; i < kSquaresNumel / 2; ++i) {
    const double low = values[i];
    const double high = values[i + kSquaresNumel / 2];
    terms[i] = low * low + high * high;
  }
  for (std::size_t half = kSquaresNumel / 4; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) terms[i] += terms[i + half];
  }
  return terms[0];
}

// The level of the first root of the blocks [first, last), which are not empty.
int level_of_first(std::uint64_t first, std::uint64_t last) {
  const int largest = static_cast<int>(std::bit_width(last - first)) - 1;
  return first == 0 ? largest : std::min(std::countr_zero(first), largest);
}

// The roots of what was added so far.
class Roots {
 public:
  // Adds a node that begins where the last one has ended.
  void add(int level, std::uint64_t first, double sum) {
    // A node whose number in its level is odd completes the one that its left half has begun.
    while (!levels_.empty() && levels_.back() == level && (first >> level) % 2 == 1) {
      sum = sums_.back() + sum;
      first -= std::uint64_t{1} << level++;
      levels_.pop_back();
      sums_.pop_back();
    }
    levels_.push_back(level);
    sums_.push_back(sum);
  }

  const std::vector<double>& sums() const { return sums_; }

 private:
  std::vector<int> levels_;
  std::vector<double> sums_;
};

}  // namespace

std::vector<double> roots_of(const double* sums, std::size_t count, std::uint64_t first) {
  const DefaultFloatEnvironment environment;
  Roots roots;
  for (std::size_t i = 0; i < count; ++i) roots.add(0, first + i, sums[i]);
  return roots.sums();
}

std::size_t num_roots(std::uint64_t first, std::uint64_t last) {
  std::size_t count = 0;
  for (; first < last; ++count) first += std::uint64_t{1} << level_of_first(first, last);
  return count;
}

double tree_sum(const double* roots, const std::uint64_t* bounds, std::size_t num_runs) {
  const DefaultFloatEnvironment environment;
  Roots all;
  for (std::size_t run = 0; run < num_runs; ++run) {
    for (std::uint64_t first = bounds[run]; first < bounds[run + 1];) {
      const int level = level_of_first(first, bounds[run + 1]);
      all.add(level, first, *roots++);
      first += std::uint64_t{1} << level;
    }
  }
  // What is left of the tree has no right half.
  double sum = 0;
  for (auto root = all.sums().rbegin(); root != all.sums().rend(); ++root) {
    sum = root == all.sums().rbegin() ? *root : *root + sum;
  }
  return sum;
}

void sum_squares(const float* values, std::size_t numel, double* sums, std::size_t num_threads) {
  const std::size_t num_blocks = (numel + kSquaresNumel - 1) / kSquaresNumel;
  const std::size_t num_items = (num_blocks + kItemBlocks - 1) / kItemBlocks;
  process_pool().run(num_items, num_threads, [&](std::size_t item) {
    const DefaultFloatEnvironment environment;
    Block terms;
    std::array<float, kSquaresNumel> last;
    const std::size_t end = std::min((item + 1) * kItemBlocks, num_blocks);
    for (std::size_t block = item * kItemBlocks; block < end; ++block) {
      const float* elements = values + block * kSquaresNumel;
      const std::size_t left = numel - block * kSquaresNumel;
      if (left < kSquaresNumel) {
        last.fill(0.0F);
        std::copy_n(elements, left, last.begin());
        elements = last.data();
      }
      sums[block] = tree_of(elements, terms);
    }
  });
}

}  // namespace infinity::update

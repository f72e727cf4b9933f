#include "update/update.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "update/squares.h"
#include "update/sums.h"
#include "update/thread_pool.h"

using namespace infinity::update;

namespace {

constexpr float kAdamW[] = {0.0F, 0.9999F, 0.1F, 0.999F, 0.001F, 0.05F, 1e-8F, 0.01F};

// Pseudo-random numbers of all magnitudes, the same in every run; heap arrays of exactly `numel`
// elements, so that a sanitizer sees one element too many.
struct State {
  std::vector<float> weight, gradient, exp_avg, exp_avg_sq;
  std::vector<std::uint16_t> narrow_weight, narrow_gradient;
  std::vector<std::int16_t> residual;

  explicit State(std::size_t numel)
      : weight(numel),
        gradient(numel),
        exp_avg(numel),
        exp_avg_sq(numel),
        narrow_weight(numel),
        narrow_gradient(numel),
        residual(numel) {
    std::uint32_t seed = 12345;
    const auto next = [&seed] {
      seed = seed * 1664525U + 1013904223U;
      const auto mantissa = static_cast<float>(seed >> 8) / 8388608.0F - 1.0F;
      return mantissa * ((seed & 0x40U) != 0 ? 1e-20F : 1.0F);
    };
    for (std::size_t i = 0; i < numel; ++i) {
      weight[i] = next();
      gradient[i] = next();
      exp_avg[i] = next();
      exp_avg_sq[i] = next() * weight[i];
      if (exp_avg_sq[i] < 0) exp_avg_sq[i] = -exp_avg_sq[i];
      narrow_weight[i] = static_cast<std::uint16_t>(0x3F00U + i % 0x81U);
      narrow_gradient[i] = static_cast<std::uint16_t>(0x3E00U + i % 0x7DU);
      residual[i] = static_cast<std::int16_t>(i * 7919U % 65536U);
    }
  }

  Arrays arrays(WeightFormat weight_format) {
    Arrays made{weight.data(), nullptr, {exp_avg.data(), exp_avg_sq.data()}, {}, {}};
    if (weight_format == WeightFormat::kSplit) {
      made.weight = narrow_weight.data();
      made.residual = residual.data();
    }
    return made;
  }

  Span span(WeightFormat weight_format, GradientFormat gradient_format) {
    const Arrays made = arrays(weight_format);
    const bool is_bf16 = gradient_format == GradientFormat::kBf16;
    const void* const read = is_bf16 ? static_cast<const void*>(narrow_gradient.data())
                                     : static_cast<const void*>(gradient.data());
    return {made, made, read, weight.size()};
  }

  [[nodiscard]] bool has_bits_of(const State& other) const {
    return std::memcmp(weight.data(), other.weight.data(), weight.size() * 4) == 0 &&
           std::memcmp(exp_avg.data(), other.exp_avg.data(), exp_avg.size() * 4) == 0 &&
           std::memcmp(exp_avg_sq.data(), other.exp_avg_sq.data(), exp_avg_sq.size() * 4) == 0 &&
           narrow_weight == other.narrow_weight && residual == other.residual;
  }
};

void update_span(const Span& span, const InstructionSet& set, WeightFormat weight_format,
                 GradientFormat gradient_format, std::size_t num_threads) {
  Job job;
  job.rule = find_rule(set, "adam");
  job.coefficients = kAdamW;
  job.weight_format = weight_format;
  job.gradient_format = gradient_format;
  job.gradient_scale = 0.5F;
  job.num_threads = num_threads;
  apply(job, {&span, 1});
}

void update(State& state, const InstructionSet& set, WeightFormat weight_format,
            GradientFormat gradient_format, std::size_t num_threads) {
  update_span(state.span(weight_format, gradient_format), set, weight_format, gradient_format,
              num_threads);
}

// Memory for new arrays that begins at `misaligned_nbytes` behind a cache line.
class Beside {
 public:
  Beside(std::size_t numel, std::size_t misaligned_nbytes) : numel_(numel) {
    for (std::vector<unsigned char>& bytes : bytes_) {
      bytes.assign(4 * numel + 128, 0xEE);
      const auto start = reinterpret_cast<std::uintptr_t>(bytes.data());
      offsets_[static_cast<std::size_t>(&bytes - bytes_)] =
          (64 - start % 64) % 64 + misaligned_nbytes;
    }
  }

  Arrays arrays(bool is_split) {
    return {at(0), is_split ? reinterpret_cast<std::int16_t*>(at(1)) : nullptr,
            {reinterpret_cast<float*>(at(2)), reinterpret_cast<float*>(at(3))}, {}, {}};
  }

  bool has_bits_of(const Arrays& expected, bool is_split) {
    const std::size_t nbytes = numel_ * (is_split ? 2 : 4);
    return holds(0, expected.weight, nbytes) &&
           (!is_split || holds(1, expected.residual, 2 * numel_)) &&
           holds(2, expected.states[0], 4 * numel_) && holds(3, expected.states[1], 4 * numel_);
  }

 private:
  unsigned char* at(std::size_t index) { return bytes_[index].data() + offsets_[index]; }
  bool holds(std::size_t index, const void* expected, std::size_t nbytes) {
    return std::memcmp(at(index), expected, nbytes) == 0 && at(index)[nbytes] == 0xEE;
  }

  std::size_t numel_;
  std::vector<unsigned char> bytes_[4];
  std::size_t offsets_[4] = {};
};

}  // namespace

TEST(ScalarIsAlwaysThereAndLast) {
  CHECK(!instruction_sets().empty() && instruction_sets().back().name == "scalar");
  CHECK(find_instruction_set("") == &instruction_sets().front());
  CHECK(find_instruction_set("altivec") == nullptr);
  CHECK(find_rule(*find_instruction_set(""), "no such rule") == nullptr);
}

TEST(EveryInstructionSetHasTheSameRules) {
  const KernelTable scalar = find_instruction_set("scalar")->table;
  for (const InstructionSet& set : instruction_sets()) {
    CHECK(set.table.num_rules == scalar.num_rules);
    for (std::size_t i = 0; i < scalar.num_rules; ++i) {
      CHECK(std::strcmp(set.table.rules[i].name, scalar.rules[i].name) == 0);
      CHECK(set.table.rules[i].num_coefficients == scalar.rules[i].num_coefficients);
    }
  }
}

TEST(EveryInstructionSetHasTheBitsOfScalarAtEveryLength) {
  for (const WeightFormat weight_format : {WeightFormat::kFp32, WeightFormat::kSplit}) {
    for (const GradientFormat gradient_format : {GradientFormat::kFp32, GradientFormat::kBf16}) {
      for (std::size_t numel = 1; numel < 140; ++numel) {
        State expected(numel);
        update(expected, *find_instruction_set("scalar"), weight_format, gradient_format, 1);
        for (const InstructionSet& set : instruction_sets()) {
          State found(numel);
          update(found, set, weight_format, gradient_format, 1);
          CHECK(found.has_bits_of(expected));
        }
      }
    }
  }
}

TEST(NewStateBesideTheOldHasTheBitsOfAnUpdateInPlaceAndLeavesTheOld) {
  for (const WeightFormat weight_format : {WeightFormat::kFp32, WeightFormat::kSplit}) {
    const bool is_split = weight_format == WeightFormat::kSplit;
    for (const GradientFormat gradient_format : {GradientFormat::kFp32, GradientFormat::kBf16}) {
      for (const std::size_t numel : {1U, 15U, 33U, 64U, 139U, 65536U + 77U}) {
        State expected(numel);
        update(expected, *find_instruction_set("scalar"), weight_format, gradient_format, 1);
        for (const InstructionSet& set : instruction_sets()) {
          for (const std::size_t misaligned_nbytes : {0U, 4U, 32U}) {
            State state(numel);
            Beside beside(numel, misaligned_nbytes);
            Span span = state.span(weight_format, gradient_format);
            span.to = beside.arrays(is_split);
            update_span(span, set, weight_format, gradient_format, 2);
            CHECK(beside.has_bits_of(expected.arrays(weight_format), is_split));
            CHECK(state.has_bits_of(State(numel)));
          }
        }
      }
    }
  }
}

TEST(ThreadsChangeNoBit) {
  constexpr std::size_t kNumel = 300'007;
  State expected(kNumel);
  const InstructionSet& set = *find_instruction_set("");
  update(expected, set, WeightFormat::kFp32, GradientFormat::kFp32, 1);
  for (const std::size_t num_threads : {2U, 3U, 9U}) {
    State found(kNumel);
    update(found, set, WeightFormat::kFp32, GradientFormat::kFp32, num_threads);
    CHECK(found.has_bits_of(expected));
  }
}

TEST(EveryByteThatChangesIsToldOnceWhenItIsWritten) {
  const std::size_t numel = 3 * 65536 + 8 * 5 + 3;
  for (const WeightFormat weight_format : {WeightFormat::kFp32, WeightFormat::kSplit}) {
    for (const std::size_t num_threads : {std::size_t{1}, std::size_t{3}}) {
      State expected(numel), state(numel);
      update(expected, *find_instruction_set(""), weight_format, GradientFormat::kFp32, 1);
      const Span span = state.span(weight_format, GradientFormat::kFp32);
      const Span wanted = expected.span(weight_format, GradientFormat::kFp32);
      const bool is_split = weight_format == WeightFormat::kSplit;
      struct Array {
        const void* told;
        const void* wanted;
        std::size_t nbytes;
      };
      std::vector<Array> arrays{{span.to.weight, wanted.to.weight, numel * (is_split ? 2 : 4)},
                                {span.to.states[0], wanted.to.states[0], numel * 4},
                                {span.to.states[1], wanted.to.states[1], numel * 4}};
      if (is_split) arrays.push_back({span.to.residual, wanted.to.residual, numel * 2});
      std::atomic<std::size_t> told_nbytes{0};
      std::atomic<bool> is_new{true};
      Job job;
      job.rule = find_rule(*find_instruction_set(""), "adam");
      job.coefficients = kAdamW;
      job.weight_format = weight_format;
      job.gradient_scale = 0.5F;
      job.num_threads = num_threads;
      job.written = [&](const void* start, std::size_t nbytes) {
        told_nbytes += nbytes;
        const auto* first = static_cast<const unsigned char*>(start);
        bool is_found = false;
        for (const Array& array : arrays) {
          const auto* begin = static_cast<const unsigned char*>(array.told);
          if (first < begin || first + nbytes > begin + array.nbytes) continue;
          const auto* same = static_cast<const unsigned char*>(array.wanted) + (first - begin);
          is_found = std::memcmp(first, same, nbytes) == 0;
        }
        if (!is_found) is_new = false;
      };
      apply(job, {&span, 1});
      std::size_t changed_nbytes = 0;
      for (const Array& array : arrays) changed_nbytes += array.nbytes;
      CHECK(is_new && told_nbytes == changed_nbytes && state.has_bits_of(expected));
    }
  }
}

TEST(PoolCallsEveryItemOnce) {
  ThreadPool pool;
  for (std::size_t num_items = 0; num_items < 200; ++num_items) {
    std::vector<std::atomic<int>> calls(num_items);
    pool.run(num_items, 1 + num_items % 5, [&](std::size_t item) { ++calls[item]; });
    for (const std::atomic<int>& count : calls) CHECK(count == 1);
  }
}

TEST(PoolUsesNoMoreThreadsThanAllowed) {
  ThreadPool pool;
  pool.run(64, 8, [](std::size_t) {});  // More workers exist than the next call may use.
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> at_work{0};
    std::atomic<int> most{0};
    pool.run(64, 2, [&](std::size_t) {
      const int now = ++at_work;
      int before = most;
      while (now > before && !most.compare_exchange_weak(before, now)) {
      }
      std::this_thread::yield();
      --at_work;
    });
    CHECK(most <= 2);
  }
}

TEST(PoolTakesCallsFromManyThreads) {
  ThreadPool pool;
  std::atomic<int> num_calls{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        pool.run(10, 3, [&](std::size_t) { ++num_calls; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(num_calls == 4000);
}

TEST(SquaresAreSummedAsTreesOfTheirOwnAtEveryLength) {
  for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, kSquaresNumel - 1, kSquaresNumel,
                                  kSquaresNumel + 1, 600 * kSquaresNumel + 7}) {
    const State state(numel);
    std::vector<double> expected;
    for (std::size_t first = 0; first < numel; first += kSquaresNumel) {
      std::vector<double> terms(kSquaresNumel, 0.0);
      for (std::size_t i = 0; i < kSquaresNumel && first + i < numel; ++i) {
        terms[i] = static_cast<double>(state.gradient[first + i]) * state.gradient[first + i];
      }
      for (std::size_t half = kSquaresNumel / 2; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) terms[i] += terms[i + half];
      }
      expected.push_back(terms[0]);
    }
    for (const std::size_t num_threads : {1U, 3U}) {
      std::vector<double> found(expected.size());
      sum_squares(state.gradient.data(), numel, found.data(), num_threads);
      CHECK(found == expected);
    }
  }
}

// The tree by its definition: a node is the sum of its halves, or the only half that has blocks.
double reference_tree(const std::vector<double>& sums, std::size_t first, std::size_t width) {
  if (width == 1) return sums[first];
  const double left = reference_tree(sums, first, width / 2);
  if (first + width / 2 >= sums.size()) return left;
  return left + reference_tree(sums, first + width / 2, width / 2);
}

TEST(TheTreeOverBlocksHasTheSameBitsWhereverRunsOfBlocksEnd) {
  for (const std::size_t count : {1U, 2U, 3U, 7U, 8U, 21U, 64U, 100U}) {
    const State state(count);
    std::vector<double> sums(count);
    for (std::size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<double>(state.weight[i]) * state.exp_avg[i];
    }
    std::size_t width = 1;
    while (width < count) width *= 2;
    const double expected = reference_tree(sums, 0, width);
    for (std::size_t low = 0; low <= count; ++low) {
      for (std::size_t high = low; high <= count; ++high) {
        const std::vector<std::uint64_t> bounds = {0, low, high, count};
        std::vector<double> roots;
        for (std::size_t run = 0; run < 3; ++run) {
          const std::vector<double> part(sums.data() + bounds[run], sums.data() + bounds[run + 1]);
          const std::vector<double> found = roots_of(part.data(), part.size(), bounds[run]);
          CHECK(found.size() == num_roots(bounds[run], bounds[run + 1]));
          roots.insert(roots.end(), found.begin(), found.end());
        }
        CHECK(tree_sum(roots.data(), bounds.data(), 3) == expected);
      }
    }
  }
}

float widened(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16U;
  float found = 0;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

TEST(NormsOfBf16AreThoseOfTheElementsAtEveryLength) {
  for (std::size_t numel = 0; numel < 70; ++numel) {
    const State state(numel);
    double squares = 0;
    for (const std::uint16_t value : state.narrow_gradient) {
      const double wide = widened(value);
      squares += wide * wide;
    }
    const double expected = std::sqrt(squares);
    for (const InstructionSet& set : instruction_sets()) {
      for (const NormKernel norm : set.table.norms) {
        const double found = norm(state.narrow_gradient.data(), numel);
        CHECK(std::abs(found - expected) <= 1e-6 * expected);
      }
    }
  }
}

TEST(SumsProductsAndCopiesAreThoseOfTheElementsAtEveryLength) {
  constexpr std::size_t kItemNumel = std::size_t{1} << 18;
  for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, kItemNumel, 3 * kItemNumel + 7}) {
    for (const std::size_t num_threads : {1U, 3U}) {
      const State state(numel);
      std::vector<float> total = state.weight, narrow_total = state.weight;
      std::vector<float> product(numel), narrow_product(numel), target(numel);
      add(total.data(), state.gradient.data(), GradientFormat::kFp32, numel, num_threads);
      add(narrow_total.data(), state.narrow_gradient.data(), GradientFormat::kBf16, numel,
          num_threads);
      multiply(product.data(), state.gradient.data(), GradientFormat::kFp32, 0.3F, numel,
               num_threads);
      multiply(narrow_product.data(), state.narrow_gradient.data(), GradientFormat::kBf16, 0.3F,
               numel, num_threads);
      copy(target.data(), state.weight.data(), numel * sizeof(float), num_threads);
      bool is_right = target == state.weight;
      for (std::size_t i = 0; i < numel; ++i) {
        const float narrow = widened(state.narrow_gradient[i]);
        is_right = is_right && total[i] == state.weight[i] + state.gradient[i] &&
                   narrow_total[i] == state.weight[i] + narrow &&
                   product[i] == state.gradient[i] * 0.3F && narrow_product[i] == narrow * 0.3F;
      }
      CHECK(is_right);
    }
  }
}

TEST(LargeCopiesPastTheCachesAreExactAtEveryAlignment) {
  constexpr std::size_t kNbytes = (std::size_t{1} << 23) + 77;
  std::vector<std::uint8_t> source(kNbytes + 64);
  for (std::size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<std::uint8_t>(i * 31U + (i >> 8U));
  }
  for (const std::size_t from : {std::size_t{0}, std::size_t{3}}) {
    for (const std::size_t to : {std::size_t{0}, std::size_t{1}, std::size_t{63}}) {
      std::vector<std::uint8_t> target(kNbytes + 128, 255);
      copy(target.data() + to, source.data() + from, kNbytes, 3);
      CHECK(std::equal(source.data() + from, source.data() + from + kNbytes, target.data() + to));
      CHECK(to == 0 || target[to - 1] == 255);
      CHECK(target[to + kNbytes] == 255);
    }
  }
}

// Codes and scales in heap arrays of their own length.
struct State8Bit {
  std::vector<std::uint8_t> codes[2];
  std::vector<float> scales[2];

  explicit State8Bit(std::size_t numel) {
    for (std::size_t s = 0; s < 2; ++s) {
      for (std::size_t i = 0; i < numel; ++i) {
        codes[s].push_back(static_cast<std::uint8_t>(i * 37U + s));
      }
      for (std::size_t i = 0; i < (numel + kBlockNumel - 1) / kBlockNumel; ++i) {
        scales[s].push_back(1e-3F * static_cast<float>(i + 1));
      }
    }
  }
};

Arrays arrays_8bit(State& state, State8Bit& moments) {
  Arrays arrays = state.arrays(WeightFormat::kSplit);
  for (std::size_t s = 0; s < 2; ++s) {
    arrays.states[s] = nullptr;
    arrays.codes[s] = moments.codes[s].data();
    arrays.scales[s] = moments.scales[s].data();
  }
  return arrays;
}

// `to`: where the new bytes go; null: in place.
void update_8bit(State& state, State8Bit& moments, const InstructionSet& set,
                 std::size_t num_threads, const Arrays* to = nullptr) {
  const Arrays from = arrays_8bit(state, moments);
  const Span span{from, to == nullptr ? from : *to, state.gradient.data(), state.weight.size()};
  Job job;
  job.rule = find_rule(set, "adam");
  job.coefficients = kAdamW;
  job.weight_format = WeightFormat::kSplit;
  job.state_format = StateFormat::k8Bit;
  job.num_threads = num_threads;
  apply(job, {&span, 1});
}

TEST(EightBitsHaveTheBitsOfScalarAtEveryLength) {
  for (std::size_t numel = 1; numel < 600; numel += numel < 70 ? 1 : 13) {
    State expected(numel);
    State8Bit expected_moments(numel);
    update_8bit(expected, expected_moments, *find_instruction_set("scalar"), 1);
    for (const InstructionSet& set : instruction_sets()) {
      State found(numel);
      State8Bit found_moments(numel);
      update_8bit(found, found_moments, set, 1);
      CHECK(found.has_bits_of(expected));
      State old(numel), beside(numel);
      State8Bit old_moments(numel), moments_beside(numel);
      const Arrays to = arrays_8bit(beside, moments_beside);
      update_8bit(old, old_moments, set, 1, &to);
      CHECK(beside.has_bits_of(expected) && old.has_bits_of(State(numel)));
      for (std::size_t s = 0; s < 2; ++s) {
        CHECK(found_moments.codes[s] == expected_moments.codes[s]);
        CHECK(found_moments.scales[s] == expected_moments.scales[s]);
        CHECK(moments_beside.codes[s] == expected_moments.codes[s]);
        CHECK(moments_beside.scales[s] == expected_moments.scales[s]);
        CHECK(old_moments.codes[s] == State8Bit(numel).codes[s]);
      }
    }
  }
}

TEST(EightBitsDoNotDependOnThreads) {
  constexpr std::size_t kNumel = 200'007;
  State expected(kNumel), found(kNumel);
  State8Bit expected_moments(kNumel), found_moments(kNumel);
  update_8bit(expected, expected_moments, *find_instruction_set(""), 1);
  update_8bit(found, found_moments, *find_instruction_set(""), 5);
  CHECK(found.has_bits_of(expected));
  CHECK(found_moments.codes[0] == expected_moments.codes[0]);
  CHECK(found_moments.scales[1] == expected_moments.scales[1]);
}

int main() { return check::run_tests(); }

// The optimizer's update of any number of spans, on a bounded number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "dispatch.h"
#include "span.h"

namespace infinity::update {

struct Job {
  const RuleKernels* rule = nullptr;
  const float* coefficients = nullptr;  // As many as the rule has.
  WeightFormat weight_format = WeightFormat::kFp32;
  GradientFormat gradient_format = GradientFormat::kFp32;
  StateFormat state_format = StateFormat::kFp32;
  float gradient_scale = 1.0F;  // Gradients are multiplied by it as they are read.
  std::size_t num_threads = 1;
  // Called with ranges of bytes that have their new content, soon after a thread has written them:
  // they are in its cache. No two ranges overlap; all threads call.
  std::function<void(const void* start, std::size_t nbytes)> written;
};

// Updates every span, in one pass over memory. A gradient that is not finite is used as it is. Neither
// the number of threads nor the instruction set changes a bit of the result, nor does the caller's
// rounding mode or flushing of denormals. Blocks; holds no lock of the caller's.
void apply(const Job& job, std::span<const Span> spans);

}  // namespace infinity::update

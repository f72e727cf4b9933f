#include "update.h"

#include <algorithm>
#include <vector>

#include "float_environment.h"
#include "thread_pool.h"

namespace infinity::update {

namespace {

// Elements that one thread takes at a time: long enough for prefetchers to run (256 KiB of each
// fp32 stream), short enough that threads end together. A multiple of every vector, so a cut is
// where an uncut update would have started a vector too.
constexpr std::size_t kItemNumel = std::size_t{1} << 16;
static_assert(kItemNumel % kReferenceLanes == 0 && kItemNumel % kBlockNumel == 0);

struct Item {
  const Span* span;
  std::size_t start;
  std::size_t stop;
};

// Tells the item's range of each array that the kernel has written, but for the scales of 8-bit
// states: an item has less than a page of them.
void tell_written(const Job& job, const Item& item) {
  const Arrays& to = item.span->to;
  const auto tell = [&](const void* array, std::size_t element_nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(array);
    if (bytes == nullptr) return;
    job.written(bytes + item.start * element_nbytes, (item.stop - item.start) * element_nbytes);
  };
  tell(to.weight, job.weight_format == WeightFormat::kFp32 ? 4 : 2);
  tell(to.residual, 2);
  for (std::size_t i = 0; i < job.rule->num_states; ++i) {
    tell(to.states[i], 4);
    tell(to.codes[i], 1);
  }
}

}  // namespace

void apply(const Job& job, std::span<const Span> spans) {
  const Kernel kernel =
      job.rule->kernels[static_cast<std::size_t>(job.state_format)][static_cast<std::size_t>(
          job.weight_format)][static_cast<std::size_t>(job.gradient_format)];
  std::vector<Item> items;
  std::size_t numel = 0;
  for (const Span& span : spans) {
    numel += span.numel;
    for (std::size_t start = 0; start < span.numel; start += kItemNumel) {
      items.push_back({&span, start, std::min(start + kItemNumel, span.numel)});
    }
  }
  const auto update_item = [&](std::size_t index) {
    const Item& item = items[index];
    const DefaultFloatEnvironment environment;
    kernel(*item.span, item.start, item.stop, item.stop == item.span->numel, job.coefficients,
           job.gradient_scale);
    if (job.written) tell_written(job, item);
  };
  // Waking a thread costs about what an item does.
  const std::size_t num_worth = (numel + kItemNumel - 1) / kItemNumel;
  process_pool().run(items.size(), std::min(job.num_threads, num_worth), update_item);
}

}  // namespace infinity::update

// Which depth is found, over drives of every speed and noise.
#include "depth_control.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "fixtures.h"

namespace depth_control_test {

using namespace fixtures;

namespace {

constexpr std::uint32_t kLeast = 2, kStart = 4, kMost = 64;

// Answers at full speed from `knee` blocks in flight on; rates of epochs are off by up to `noise`,
// and the whole drive slows down by `drift` per epoch.
struct Drive {
  double knee;
  double noise;
  double drift;
  double peak = 1e9;

  double rate(std::uint32_t depth, std::mt19937& random) {
    std::uniform_real_distribution<double> error(1 - noise, 1 + noise);
    peak *= 1 - drift;
    return peak * std::min(1.0, depth / knee) * error(random);
  }
  [[nodiscard]] double share(std::uint32_t depth) const { return std::min(1.0, depth / knee); }
};

}  // namespace

TEST(TheFastestDepthIsFoundAndKeptWithinTheLimits) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    Drive drive{std::uniform_real_distribution<double>(1, 80)(random),
                std::uniform_real_distribution<double>(0, 0.01)(random),
                std::uniform_real_distribution<double>(-0.001, 0.001)(random)};
    const double best = drive.share(kMost);
    DepthControl control(kStart, kLeast, kMost);
    std::uint32_t num_changes = 0, num_trials = 0, base = control.base();
    for (int epoch = 0; epoch < 2000; ++epoch) {
      CHECK(control.depth() >= kLeast && control.depth() <= kMost);
      if (epoch >= 200) num_trials += control.depth() != control.base() ? 1U : 0U;
      control.note(drive.rate(control.depth(), random));
      if (epoch >= 200) {
        num_changes += control.base() != base ? 1U : 0U;
        CHECK(drive.share(control.base()) >= 0.97 * best);
      }
      base = control.base();
    }
    // Not deeper than needed: half of it would lose more than one percent.
    const std::uint32_t half = std::max(kLeast, base / 2);
    CHECK(half == base || drive.share(half) < 0.99 * best + 2 * drive.noise);
    CHECK(num_changes <= 4);  // It stays where it is,
    CHECK(num_trials <= 90);  // and looks around seldom.
  }
}

TEST(TheDepthFollowsADriveThatHasChanged) {
  std::mt19937 random(1);
  Drive slow{2, 0.005, 0}, fast{32, 0.005, 0};
  DepthControl control(kStart, kLeast, kMost);
  for (int epoch = 0; epoch < 3000; ++epoch) control.note(slow.rate(control.depth(), random));
  CHECK(control.base() == 2);
  for (int epoch = 0; epoch < 2000; ++epoch) control.note(fast.rate(control.depth(), random));
  CHECK(control.base() == 32);
}

TEST(AnInterruptedTrialChangesNothing) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    Drive drive{64, 0, 0};
    DepthControl control(kStart, kLeast, kMost);
    for (int epoch = 0; epoch < 500; ++epoch) {
      control.note(drive.rate(control.depth(), random));
      if (control.depth() != control.base()) control.interrupt();
      CHECK(control.depth() == kStart && control.base() == kStart);
    }
  }
}

TEST(ADepthWithoutRangeIsFixed) {
  DepthControl control(3, 3, 3);
  for (int epoch = 0; epoch < 100; ++epoch) {
    control.note(epoch);
    CHECK(control.depth() == 3 && control.base() == 3);
  }
}

namespace {

// The depth after `num_blocks` of writes and of reads, on a drive that answers every block in the
// same time, however many it has: each more in flight is faster.
std::uint32_t depth_after(Backend backend, bool is_found, std::uint64_t num_blocks,
                          std::uint64_t blocks_per_request,
                          std::chrono::microseconds duration = std::chrono::microseconds(500)) {
  TempFile file(num_blocks * kBlockNbytes);
  Memory source(num_blocks * kBlockNbytes), target(num_blocks * kBlockNbytes);
  source.fill(5);
  TestOptions options = options_for(backend);
  options.num_threads = 8;
  options.queue_depth = 2;
  if (is_found) options.min_queue_depth = 1;
  options.max_queue_depth = 8;
  options.tamper = [duration](const Block&, std::int64_t result) {
    std::this_thread::sleep_for(duration);
    return result;
  };
  auto engine = open_engine(options);
  const std::int32_t id = open_file(*engine, file);
  for (const Operation operation : {Operation::kWrite, Operation::kRead}) {
    Memory& memory = operation == Operation::kWrite ? source : target;
    for (std::uint64_t at = 0; at < num_blocks; at += blocks_per_request) {
      const std::uint64_t offset = at * kBlockNbytes;
      const std::uint64_t nbytes = std::min(blocks_per_request, num_blocks - at) * kBlockNbytes;
      const Ticket ticket =
          submit(*engine, operation, {{id, offset, memory.address() + offset, nbytes}});
      wait(ticket);
      CHECK(!ticket->failed());
    }
    CHECK(engine->lanes()[0].stats.queue_depth <= 8);
  }
  CHECK(std::memcmp(&source[0], &target[0], num_blocks * kBlockNbytes) == 0);
  const std::uint64_t most_in_flight = engine->stats()[0].stats.max_in_flight;
  CHECK(most_in_flight <= 8 && (is_found || most_in_flight <= 2));
  return engine->lanes()[0].stats.queue_depth;
}

}  // namespace

TEST(ADriveThatIsFasterWithMoreInFlightGetsMore) {
  constexpr std::uint64_t kNumBlocks = 2000;
  // Threads wait in `tamper` side by side. The one thread of a ring waits for each block alone, so
  // no depth is faster there: the bytes and the limits are all that is checked.
  // A machine that stalls at the wrong moment may look like a drive that does not get faster, and
  // one that is busy all the time hides a fast drive: each attempt has a slower one.
  bool is_found = false;
  for (int attempt = 0; attempt < 6 && !is_found; ++attempt) {
    const std::chrono::microseconds duration(500U << attempt);
    is_found = depth_after(Backend::kThreads, true, kNumBlocks, kNumBlocks, duration) == 8;
  }
  CHECK(is_found);
  CHECK(depth_after(Backend::kThreads, false, kNumBlocks, kNumBlocks) == 2);
  if (probe_uring().usable) {
    CHECK(depth_after(Backend::kUring, true, 400, 400) <= 8);
  }
}

TEST(AQueueThatRunsEmptySaysNothing) {
  CHECK(depth_after(Backend::kThreads, true, 600, 2) == 2);
}

}  // namespace depth_control_test

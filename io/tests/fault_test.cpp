// The fault ladder: the n-th answer of the kernel is replaced, for every n, until the scenario gets
// through untouched.
#include <atomic>
#include <cerrno>

#include "fixtures.h"

namespace fault_test {

using namespace fixtures;

namespace {

struct Kind {
  const char* name;
  std::int64_t answer;    // of the kernel; kShort stands for a part of what was asked
  std::uint64_t repeats;  // in a row
  int expected;           // errno of the ticket, 0: it succeeds all the same
};

constexpr std::int64_t kShort = 1 << 20;
constexpr std::uint64_t kFileNbytes = 256 * kKiB;

constexpr Kind kKinds[] = {
    {"EIO", -EIO, 1, EIO},
    {"ENOSPC", -ENOSPC, 1, ENOSPC},
    {"EAGAIN", -EAGAIN, 1, 0},
    {"EAGAIN for ever", -EAGAIN, 1000, EAGAIN},
    {"EINTR", -EINTR, 1, 0},
    {"EINTR for ever", -EINTR, 1000, EINTR},
    {"short", kShort, 1, 0},
    {"short without progress", 100, 1000, EIO},
    {"zero", 0, 1, EIO},
    {"EBADF", -EBADF, 1, EBADF},
    {"ENOMEM", -ENOMEM, 1, ENOMEM},
    {"EFAULT", -EFAULT, 1, EFAULT},
};

struct Outcome {
  std::uint64_t num_answers = 0;
  bool has_failed = false;
};

// What a request of `nbytes` is made of: one segment, or pages that lie apart in memory.
std::vector<Segment> segments_of(const Segment& whole, bool is_scattered) {
  if (!is_scattered) return {whole};
  std::vector<Segment> pages;
  const std::uint64_t count = whole.nbytes / 4096;
  for (std::uint64_t at = 0; at < count; ++at) {
    pages.push_back(
        {whole.file, whole.offset_nbytes + at * 4096, whole.address + at * 3 % count * 4096, 4096});
  }
  return pages;
}

// Two files, four writes, then four reads; every ticket must end well or with the right error.
Outcome climb(Backend backend, const Kind& kind, std::uint64_t rung, bool is_scattered) {
  std::atomic<std::uint64_t> num_answers{0};
  std::atomic<std::int32_t> hit_file{-1};
  TempFile files[2] = {TempFile(kFileNbytes), TempFile(kFileNbytes)};
  Memory source(2 * kFileNbytes), target(2 * kFileNbytes);
  source.fill(static_cast<unsigned>(rung));
  TestOptions options = options_for(backend);
  options.arena = source.range();
  options.tamper = [&](const Block& block, std::int64_t result) {
    const std::uint64_t count = ++num_answers;
    if (count < rung || count >= rung + kind.repeats) return result;
    hit_file = block.file->id;
    return kind.answer == kShort ? std::min<std::int64_t>(result, 4096 + 512) : kind.answer;
  };
  auto engine = open_engine(options);
  std::int32_t ids[2] = {open_file(*engine, files[0]), open_file(*engine, files[1])};
  Outcome outcome;
  for (const Operation operation : {Operation::kWrite, Operation::kRead}) {
    Memory& memory = operation == Operation::kWrite ? source : target;
    std::vector<Ticket> tickets;
    for (std::uint64_t half = 0; half < 4; ++half) {
      const std::uint64_t offset = half / 2 * (kFileNbytes / 2);
      const Segment whole{ids[half % 2], offset, memory.address() + half % 2 * kFileNbytes + offset,
                          kFileNbytes / 2};
      tickets.push_back(submit(*engine, operation, segments_of(whole, is_scattered)));
    }
    for (const Ticket& ticket : tickets) {
      wait(ticket);
      if (!ticket->failed()) continue;
      outcome.has_failed = true;
      const Error error = ticket->error();
      CHECK(error.code == kind.expected);
      CHECK(error.operation == operation);
      CHECK(kind.repeats > 1 || error.file == hit_file);
      CHECK(ticket->error_path() == files[error.file == ids[0] ? 0 : 1].path());
      CHECK(error.nbytes > 0 && error.nbytes <= kBlockNbytes);
      CHECK(error.offset_nbytes + error.nbytes <= kFileNbytes);
    }
    if (outcome.has_failed) break;
  }
  CHECK(engine->drain(kTimeLimit));  // No request is lost, whatever happened.
  if (!outcome.has_failed) {
    CHECK(std::memcmp(&source[0], &target[0], 2 * kFileNbytes) == 0);
  }
  outcome.num_answers = num_answers;
  return outcome;
}

}  // namespace

TEST(EveryAnswerOfTheKernelMayBeBad) {
  on_each_backend([](Backend backend) {
    for (const bool is_scattered : {false, true}) {
      for (const Kind& kind : kKinds) {
        // In one piece or in many an error is an error: EIO stands for all that are given up at
        // once.
        if (is_scattered && kind.repeats == 1 && kind.expected == -kind.answer &&
            kind.expected != EIO) {
          continue;
        }
        std::uint64_t rung = 1;
        bool has_failed = false;
        for (Outcome outcome = climb(backend, kind, rung, is_scattered);
             outcome.num_answers >= rung; outcome = climb(backend, kind, ++rung, is_scattered)) {
          has_failed |= outcome.has_failed;
          // Which requests the endless kinds hit, and how the rest goes, is a matter of timing.
          CHECK(kind.repeats > 1 || outcome.has_failed == (kind.expected != 0));
        }
        std::printf("  %s%s: %llu rungs\n", kind.name, is_scattered ? ", scattered" : "",
                    static_cast<unsigned long long>(rung - 1));
        CHECK(rung > 16);  // Eight blocks each way.
        CHECK(has_failed == (kind.expected != 0));
      }
    }
  });
}

}  // namespace fault_test

#include "infinity_io/block.h"

#include <cerrno>

#include "check.h"

using namespace infinity::io;

namespace {

constexpr std::uint32_t kMiB = 1U << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

struct Subject {
  File file;
  Block block;

  explicit Subject(std::uint32_t nbytes, std::uint32_t alignment_nbytes = 4096,
                   Operation operation = Operation::kRead) {
    file.alignment_nbytes = alignment_nbytes;
    block.file = &file;
    block.operation = operation;
    block.offset_nbytes = 1000 * 4096;
    block.address = 0x10000;
    block.nbytes = nbytes;
  }
};

}  // namespace

TEST(ExactTransferIsDone) {
  Subject subject(8192);
  const Judgement judgement = judge(subject.block, 8192);
  CHECK(judgement.verdict == Verdict::kDone);
  CHECK(judgement.moved_nbytes == 8192);
  CHECK(!judgement.is_short && !judgement.is_retry);
}

TEST(ShortTransferContinuesFromTheLastAlignedByte) {
  Subject subject(8192);
  const Judgement judgement = judge(subject.block, 5000);
  CHECK(judgement.verdict == Verdict::kAgain);
  CHECK(judgement.moved_nbytes == 4096 && judgement.is_short);
  CHECK(subject.block.offset_nbytes == 1001 * 4096);
  CHECK(subject.block.address == 0x11000);
  CHECK(subject.block.nbytes == 4096);
  CHECK(judge(subject.block, 4096).verdict == Verdict::kDone);
}

TEST(ShortTransferOfBufferedFileContinuesFromTheNextByte) {
  Subject subject(100, 1);
  CHECK(judge(subject.block, 1).verdict == Verdict::kAgain);
  CHECK(subject.block.nbytes == 99);
  CHECK(subject.block.address == 0x10001);
}

TEST(ShortTransferWithoutProgressTwiceIsAnError) {
  Subject subject(8192);
  CHECK(judge(subject.block, 100).verdict == Verdict::kAgain);
  CHECK(subject.block.nbytes == 8192);
  const Judgement judgement = judge(subject.block, 100);
  CHECK(judgement.verdict == Verdict::kFailed && judgement.code == EIO);
}

TEST(ProgressBetweenStallsStartsTheCountAnew) {
  Subject subject(3 * 4096);
  CHECK(judge(subject.block, 100).verdict == Verdict::kAgain);
  CHECK(judge(subject.block, 4096).verdict == Verdict::kAgain);
  CHECK(judge(subject.block, 100).verdict == Verdict::kAgain);
  CHECK(judge(subject.block, 8192).verdict == Verdict::kDone);
}

TEST(ZeroIsEndOfFileOrALostWrite) {
  Subject reading(4096);
  CHECK(judge(reading.block, 0).verdict == Verdict::kFailed);
  Subject writing(4096, 4096, Operation::kWrite);
  const Judgement judgement = judge(writing.block, 0);
  CHECK(judgement.verdict == Verdict::kFailed && judgement.code == EIO);
}

TEST(InterruptionsAreRetriedABoundedNumberOfTimes) {
  for (const int code : {EAGAIN, EINTR}) {
    Subject subject(4096);
    for (std::uint32_t retry = 0; retry < kMaxRetries; ++retry) {
      const Judgement judgement = judge(subject.block, -code);
      CHECK(judgement.verdict == Verdict::kAgain && judgement.is_retry);
    }
    const Judgement judgement = judge(subject.block, -code);
    CHECK(judgement.verdict == Verdict::kFailed && judgement.code == code);
  }
}

TEST(OtherErrorsAreNotRetried) {
  for (const int code : {EIO, ENOSPC, EINVAL, EFAULT, EBADF, ECANCELED}) {
    Subject subject(4096);
    const Judgement judgement = judge(subject.block, -code);
    CHECK(judgement.verdict == Verdict::kFailed && judgement.code == code);
  }
}

TEST(BlocksNeverCrossARegisteredBuffer) {
  const ArenaRange arena{16 * kGiB, 3 * kGiB};
  CHECK(block_span(arena.address, 3 * kGiB, 4 * kMiB, arena) == 4 * kMiB);
  CHECK(block_span(arena.address + kGiB - kMiB, 4 * kMiB, 4 * kMiB, arena) == kMiB);
  CHECK(block_span(arena.address + kGiB, 4 * kMiB, 4 * kMiB, arena) == 4 * kMiB);
  CHECK(block_span(arena.address + 2 * kGiB - 4096, 8192, 4 * kMiB, arena) == 4096);
  // Outside the arena nothing is registered.
  CHECK(block_span(arena.address - kMiB, 4 * kMiB, 4 * kMiB, arena) == 4 * kMiB);
  CHECK(block_span(4096, 100, 4 * kMiB, ArenaRange{}) == 100);
}

TEST(CuttingCoversEverySegmentInOrderWithoutOverlap) {
  File file;
  Part part;
  part.segments = {{0, 0, 0x100000, 10000}, {0, 50000, 0x900000, 4096}, {0, 4, 0x5, 1}};
  part.files = {&file, &file, &file};
  std::size_t segment = 0;
  std::uint64_t done_nbytes = 0;
  while (!part.is_cut()) {
    const Block block = cut_block(part, 4096, ArenaRange{});
    CHECK(block.nbytes > 0 && block.nbytes <= 4096);
    CHECK(block.offset_nbytes == part.segments[segment].offset_nbytes + done_nbytes);
    CHECK(block.address == part.segments[segment].address + done_nbytes);
    done_nbytes += block.nbytes;
    if (done_nbytes == part.segments[segment].nbytes) {
      ++segment;
      done_nbytes = 0;
    }
  }
  CHECK(segment == 3);
}

TEST(ArenaHoldsOnlyWhatLiesInsideIt) {
  const ArenaRange arena{0x1000, 0x2000};
  CHECK(arena.holds(0x1000, 0x2000));
  CHECK(arena.holds(0x2fff, 1));
  CHECK(!arena.holds(0x2fff, 2));
  CHECK(!arena.holds(0xfff, 1));
  CHECK(!arena.holds(0x3000, 1));
  CHECK(!arena.holds(0x1000, ~std::uint64_t{0}));
}

int main() { return check::run_all_tests(); }

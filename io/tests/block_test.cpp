#include "block.h"

#include <cerrno>
#include <vector>

#include "check.h"
#include "order.h"

namespace block_test {

using namespace infinity::io;

namespace {

constexpr std::uint32_t kMiB = 1U << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

iovec piece(std::uintptr_t address, std::size_t nbytes) {
  return {reinterpret_cast<void*>(address), nbytes};
}

std::uintptr_t address_of(const iovec& piece) {
  return reinterpret_cast<std::uintptr_t>(piece.iov_base);
}

struct Subject {
  File file;
  Block block;

  explicit Subject(std::uint32_t nbytes, std::uint32_t alignment_nbytes = 4096,
                   Operation operation = Operation::kRead) {
    file.alignment_nbytes = alignment_nbytes;
    block.file = &file;
    block.operation = operation;
    block.offset_nbytes = 1000 * 4096;
    block.nbytes = nbytes;
    block.pieces = {piece(0x10000, nbytes)};
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
  CHECK(address_of(subject.block.pieces[0]) == 0x11000);
  CHECK(subject.block.pieces[0].iov_len == 4096);
  CHECK(subject.block.nbytes == 4096);
  CHECK(judge(subject.block, 4096).verdict == Verdict::kDone);
}

TEST(ShortTransferOfBufferedFileContinuesFromTheNextByte) {
  Subject subject(100, 1);
  CHECK(judge(subject.block, 1).verdict == Verdict::kAgain);
  CHECK(subject.block.nbytes == 99);
  CHECK(address_of(subject.block.pieces[0]) == 0x10001);
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

namespace {

// A part over one file, as the engine builds it.
struct Cut {
  File file;
  Part part;

  explicit Cut(std::vector<Segment> segments, Operation operation = Operation::kRead) {
    part.operation = operation;
    part.ranges = covered_ranges(segments);
    part.files.assign(segments.size(), &file);
    part.segments = std::move(segments);
  }

  Block next(std::uint32_t block_nbytes) {
    Block block;
    shape_block(part, block_nbytes, ArenaRange{}, block);
    cut(part, block.nbytes);
    return block;
  }
};

}  // namespace

TEST(CuttingCoversEverySegmentInOrderWithoutOverlap) {
  Cut subject({{0, 0, 0x100000, 10000}, {0, 50000, 0x900000, 4096}, {0, 60000, 0x5, 1}});
  std::size_t segment = 0;
  std::uint64_t done_nbytes = 0;
  while (!subject.part.is_cut()) {
    const Block block = subject.next(4096);
    CHECK(block.nbytes > 0 && block.nbytes <= 4096 && block.pieces.size() == 1);
    CHECK(block.offset_nbytes == subject.part.segments[segment].offset_nbytes + done_nbytes);
    CHECK(address_of(block.pieces[0]) == subject.part.segments[segment].address + done_nbytes);
    done_nbytes += block.nbytes;
    if (done_nbytes == subject.part.segments[segment].nbytes) {
      ++segment;
      done_nbytes = 0;
    }
  }
  CHECK(segment == 3);
}

TEST(SegmentsThatGoOnInTheFileShareABlock) {
  Cut subject({{0, 0, 0x900000, 4096},
               {0, 4096, 0x100000, 8192},
               {0, 12288, 0x102000, 4096},
               {0, 20480, 0x200000, 4096}});
  const Block first = subject.next(64 * 1024);
  CHECK(first.offset_nbytes == 0 && first.nbytes == 16384);
  CHECK(first.pieces.size() == 2);  // What goes on in memory, too, is one piece.
  CHECK(address_of(first.pieces[0]) == 0x900000 && first.pieces[0].iov_len == 4096);
  CHECK(address_of(first.pieces[1]) == 0x100000 && first.pieces[1].iov_len == 12288);
  const Block second = subject.next(64 * 1024);  // Behind a gap in the file.
  CHECK(second.offset_nbytes == 20480 && second.nbytes == 4096 && subject.part.is_cut());
}

TEST(OnlyWholeSegmentsJoinABlock) {
  Cut subject({{0, 0, 0x900000, 20480}, {0, 20480, 0x100000, 8192}, {0, 28672, 0x200000, 8192}});
  CHECK(subject.next(16384).nbytes == 16384);
  const Block tail = subject.next(16384);  // The rest of the first, the second, not the third.
  CHECK(tail.nbytes == 4096 + 8192 && tail.pieces.size() == 2);
  CHECK(subject.next(16384).nbytes == 8192);
  CHECK(subject.part.is_cut());
}

TEST(ABlockHasNoMorePiecesThanTheKernelTakes) {
  std::vector<Segment> segments;
  for (std::uint64_t at = 0; at < kMaxPieces + 1; ++at) {
    segments.push_back({0, at * 512, 0x100000 + at * 8192, 512});
  }
  Cut subject(segments);
  CHECK(subject.next(4 * kMiB).pieces.size() == kMaxPieces);
  CHECK(subject.next(4 * kMiB).pieces.size() == 1);
  CHECK(subject.part.is_cut());
}

TEST(WholeRequestsThatGoOnWhereABlockEndsExtendIt) {
  Cut first({{0, 0, 0x100000, 4096}});
  Block block = first.next(65536);
  const auto joins = [&](Segment segment, Operation operation, std::uint64_t limit_nbytes) {
    Cut next({segment}, operation);
    next.part.files = first.part.files;
    const std::uint32_t before = block.nbytes;
    const bool has_joined = extend_block(next.part, limit_nbytes, block);
    CHECK(block.nbytes == before + (has_joined ? segment.nbytes : 0));
    return has_joined;
  };
  CHECK(!joins({0, 8192, 0x200000, 4096}, Operation::kRead, 65536));   // A gap.
  CHECK(!joins({0, 0, 0x200000, 4096}, Operation::kRead, 65536));      // The same place.
  CHECK(!joins({0, 4096, 0x200000, 4096}, Operation::kWrite, 65536));  // The other direction.
  CHECK(!joins({0, 4096, 0x200000, 4096}, Operation::kRead, 8191));    // No room.
  CHECK(joins({0, 4096, 0x200000, 4096}, Operation::kRead, 8192));
  CHECK(joins({0, 8192, 0x201000, 4096}, Operation::kRead, 65536));
  CHECK(block.pieces.size() == 2 && block.pieces[1].iov_len == 8192);
  Cut elsewhere({{0, 12288, 0x300000, 4096}});
  CHECK(!extend_block(elsewhere.part, 65536, block));  // Another file.
}

TEST(RequestWithGapsOrOverlapsExtendsNothing) {
  for (const std::uint64_t second_nbytes : {std::uint64_t{2048}, std::uint64_t{8192}}) {
    Cut first({{0, 0, 0x100000, 4096}});
    Block block = first.next(65536);
    Cut next({{0, 4096, 0x200000, 4096}, {0, 4096 + second_nbytes, 0x300000, 4096}});
    next.part.files.assign(2, &first.file);
    CHECK(!extend_block(next.part, 65536, block));
    CHECK(block.nbytes == 4096 && block.pieces.size() == 1);
  }
}

TEST(ShortTransferOfSeveralPiecesContinuesInsideTheRightOne) {
  Subject subject(5 * 4096);
  subject.block.pieces = {piece(0x10000, 4096), piece(0x40000, 3 * 4096), piece(0x80000, 4096)};
  const Judgement judgement = judge(subject.block, 2 * 4096 + 100);
  CHECK(judgement.verdict == Verdict::kAgain && judgement.moved_nbytes == 2 * 4096);
  CHECK(subject.block.offset_nbytes == 1002 * 4096 && subject.block.nbytes == 3 * 4096);
  CHECK(subject.block.pieces.size() == 2);
  CHECK(address_of(subject.block.pieces[0]) == 0x41000);
  CHECK(subject.block.pieces[0].iov_len == 2 * 4096);
  CHECK(judge(subject.block, 2 * 4096).verdict == Verdict::kAgain);  // Ends with a piece.
  CHECK(subject.block.pieces.size() == 1 && address_of(subject.block.pieces[0]) == 0x80000);
  CHECK(judge(subject.block, 4096).verdict == Verdict::kDone);
}

TEST(ARegisteredBufferHoldsAllPiecesOrNone) {
  const ArenaRange arena{16 * kGiB, 3 * kGiB};
  const auto index_of = [&arena](std::vector<iovec> pieces) {
    Block block;
    block.pieces = std::move(pieces);
    return registered_buffer(block, arena);
  };
  const std::uintptr_t second = arena.address + kGiB;
  CHECK(index_of({piece(arena.address, 4096)}) == 0);
  CHECK(index_of({piece(second, 4096), piece(second + kGiB - 4096, 4096)}) == 1);
  CHECK(index_of({piece(second - 4096, 4096), piece(second, 4096)}) == -1);
  CHECK(index_of({piece(second - 4096, 8192)}) == -1);
  CHECK(index_of({piece(second, 4096), piece(4096, 4096)}) == -1);
  CHECK(index_of({piece(arena.address + 3 * kGiB, 4096)}) == -1);
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

TEST(ReadUpToTheEndOfAReadOnlyFileIsDone) {
  Subject subject(8192);
  subject.file.is_read_only = true;
  subject.file.size_nbytes = 1000 * 4096 + 5000;
  CHECK(judge(subject.block, 5000).verdict == Verdict::kDone);
  Subject cut(8192);
  cut.file.is_read_only = true;
  cut.file.size_nbytes = 1000 * 4096 + 5000;
  CHECK(judge(cut.block, 4500).verdict == Verdict::kAgain);  // The file is shorter now.
  CHECK(judge(cut.block, 0).verdict == Verdict::kFailed);
}

}  // namespace block_test

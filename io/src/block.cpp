#include "infinity_io/block.h"

#include <algorithm>
#include <cerrno>

namespace infinity::io {

std::uint32_t block_span(std::uintptr_t address, std::uint64_t nbytes, std::uint32_t block_nbytes,
                         const ArenaRange& arena) noexcept {
  std::uint64_t span = std::min<std::uint64_t>(nbytes, block_nbytes);
  if (arena.holds(address, 1)) {
    const std::uint64_t at = (address - arena.address) % kRegisteredBufferNbytes;
    span = std::min(span, kRegisteredBufferNbytes - at);
  }
  return static_cast<std::uint32_t>(span);
}

std::uint32_t next_span(const Part& part, std::uint32_t block_nbytes,
                        const ArenaRange& arena) noexcept {
  INF_ASSERT(!part.is_cut());
  const Segment& segment = part.segments[part.segment_index];
  return block_span(segment.address + part.cut_nbytes, segment.nbytes - part.cut_nbytes,
                    block_nbytes, arena);
}

Block cut_block(Part& part, std::uint32_t block_nbytes, const ArenaRange& arena) noexcept {
  Block block;
  block.nbytes = next_span(part, block_nbytes, arena);
  const Segment& segment = part.segments[part.segment_index];
  block.part = &part;
  block.file = part.files[part.segment_index];
  block.operation = part.operation;
  block.offset_nbytes = segment.offset_nbytes + part.cut_nbytes;
  block.address = segment.address + part.cut_nbytes;
  part.cut_nbytes += block.nbytes;
  if (part.cut_nbytes == segment.nbytes) {
    ++part.segment_index;
    part.cut_nbytes = 0;
  }
  return block;
}

namespace {

Judgement failed(int code, const char* detail) noexcept {
  Judgement judgement;
  judgement.verdict = Verdict::kFailed;
  judgement.code = code;
  judgement.detail = detail;
  return judgement;
}

}  // namespace

Judgement judge(Block& block, std::int64_t result) noexcept {
  Judgement judgement;
  if (result < 0) {
    const int code = static_cast<int>(-result);
    if (code != EAGAIN && code != EINTR) return failed(code, nullptr);
    if (block.num_retries == kMaxRetries) return failed(code, "still interrupted after 8 retries");
    ++block.num_retries;
    judgement.verdict = Verdict::kAgain;
    judgement.is_retry = true;
    return judgement;
  }
  if (result == 0) {
    return failed(EIO, block.operation == Operation::kRead
                           ? "end of file: the range is not in the file"
                           : "the kernel accepted the write but moved no byte");
  }
  INF_ASSERT(result <= block.nbytes);
  if (result < block.nbytes) {
    const std::uint32_t alignment = block.file->alignment_nbytes;
    const auto moved = static_cast<std::uint32_t>(result) / alignment * alignment;
    if (moved == 0 && ++block.num_stalls == 2) {
      return failed(EIO, block.operation == Operation::kRead
                             ? "short transfer without progress: the file ends inside the range"
                             : "short transfer without progress");
    }
    if (moved != 0) block.num_stalls = block.num_retries = 0;
    block.offset_nbytes += moved;
    block.address += moved;
    block.nbytes -= moved;
    judgement.verdict = Verdict::kAgain;
    judgement.moved_nbytes = moved;
    judgement.is_short = true;
    return judgement;
  }
  judgement.moved_nbytes = block.nbytes;
  return judgement;
}

}  // namespace infinity::io

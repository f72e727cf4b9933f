#include "block.h"

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

namespace {

std::uintptr_t address_of(const iovec& piece) noexcept {
  return reinterpret_cast<std::uintptr_t>(piece.iov_base);  // NOLINT: addresses are integers here.
}

// What goes on in memory, too, becomes one piece with what was there.
void append(Block& block, std::uintptr_t address, std::uint64_t nbytes) noexcept {
  block.nbytes += static_cast<std::uint32_t>(nbytes);
  if (!block.pieces.empty()) {
    iovec& last = block.pieces.back();
    if (address_of(last) + last.iov_len == address) {
      last.iov_len += nbytes;
      return;
    }
  }
  block.pieces.push_back({reinterpret_cast<void*>(address), nbytes});  // NOLINT
}

// Drops the first `nbytes`, fewer than there are.
void advance(Block& block, std::uint32_t nbytes) noexcept {
  block.offset_nbytes += nbytes;
  block.nbytes -= nbytes;
  std::size_t moved_nbytes = nbytes;
  auto piece = block.pieces.begin();
  for (; moved_nbytes >= piece->iov_len; ++piece) moved_nbytes -= piece->iov_len;
  block.pieces.erase(block.pieces.begin(), piece);
  iovec& first = block.pieces.front();
  first.iov_base = reinterpret_cast<void*>(address_of(first) + moved_nbytes);  // NOLINT
  first.iov_len -= moved_nbytes;
}

// Whether the segments are one range of one file without a byte that two of them have.
bool is_one_range(const Part& part) noexcept {
  if (part.ranges.size() != 1) return false;
  std::uint64_t sum_nbytes = 0;
  for (const Segment& segment : part.segments) sum_nbytes += segment.nbytes;
  return part.ranges.front().nbytes() == sum_nbytes;
}

}  // namespace

void shape_block(const Part& part, std::uint32_t block_nbytes, const ArenaRange& arena,
                 Block& block) noexcept {
  INF_ASSERT(!part.is_cut());
  std::size_t index = part.segment_index;
  const Segment& first = part.segments[index];
  block.parts.clear();
  block.pieces.clear();
  block.file = part.files[index];
  block.operation = part.operation;
  block.offset_nbytes = first.offset_nbytes + part.cut_nbytes;
  block.nbytes = block.num_retries = block.num_stalls = 0;
  const std::uint64_t left_nbytes = first.nbytes - part.cut_nbytes;
  const std::uintptr_t address = first.address + part.cut_nbytes;
  const std::uint32_t span = block_span(address, left_nbytes, block_nbytes, arena);
  append(block, address, span);
  if (span != left_nbytes) return;
  for (++index; index < part.segments.size(); ++index) {
    const Segment& next = part.segments[index];
    if (part.files[index] != block.file) return;
    if (next.offset_nbytes != block.offset_nbytes + block.nbytes) return;
    if (next.nbytes > block_nbytes - block.nbytes || block.pieces.size() == kMaxPieces) return;
    append(block, next.address, next.nbytes);
  }
}

bool extend_block(const Part& part, std::uint64_t limit_nbytes, Block& block) noexcept {
  INF_ASSERT(part.segment_index == 0 && part.cut_nbytes == 0);
  if (part.operation != block.operation || part.files.front() != block.file) return false;
  const FileRange& range = part.ranges.front();
  if (range.start_nbytes != block.offset_nbytes + block.nbytes) return false;
  if (block.nbytes + range.nbytes() > limit_nbytes) return false;
  if (block.pieces.size() + part.segments.size() > kMaxPieces || !is_one_range(part)) return false;
  for (const Segment& segment : part.segments) append(block, segment.address, segment.nbytes);
  return true;
}

void cut(Part& part, std::uint64_t nbytes) noexcept {
  for (part.cut_nbytes += nbytes; !part.is_cut(); ++part.segment_index) {
    const std::uint64_t here_nbytes = part.segments[part.segment_index].nbytes;
    if (part.cut_nbytes < here_nbytes) return;
    part.cut_nbytes -= here_nbytes;
  }
  INF_ASSERT(part.cut_nbytes == 0);
}

int registered_buffer(const Block& block, const ArenaRange& arena) noexcept {
  const auto index_of = [&arena](std::uintptr_t address) {
    return (address - arena.address) / kRegisteredBufferNbytes;
  };
  const std::uintptr_t first = address_of(block.pieces.front());
  for (const iovec& piece : block.pieces) {
    const std::uintptr_t start = address_of(piece);
    if (!arena.holds(start, piece.iov_len)) return -1;
    if (index_of(start) != index_of(first)) return -1;
    if (index_of(start + piece.iov_len - 1) != index_of(first)) return -1;
  }
  return static_cast<int>(index_of(first));
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
  const bool ends_file =
      block.file->is_read_only &&
      block.offset_nbytes + static_cast<std::uint64_t>(result) == block.file->size_nbytes;
  if (result < block.nbytes && !ends_file) {
    const std::uint32_t alignment = block.file->alignment_nbytes;
    const auto moved = static_cast<std::uint32_t>(result) / alignment * alignment;
    if (moved == 0 && ++block.num_stalls == 2) {
      return failed(EIO, block.operation == Operation::kRead
                             ? "short transfer without progress: the file ends inside the range"
                             : "short transfer without progress");
    }
    if (moved != 0) {
      block.num_stalls = block.num_retries = 0;
      advance(block, moved);
    }
    judgement.verdict = Verdict::kAgain;
    judgement.moved_nbytes = moved;
    judgement.is_short = true;
    return judgement;
  }
  judgement.moved_nbytes = block.nbytes;
  return judgement;
}

}  // namespace infinity::io

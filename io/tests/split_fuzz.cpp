// Fuzzes what cuts and gathers requests into blocks and judges the kernel's answers, against a
// device that answers anything. Built with INFINITY_FUZZ it is a libFuzzer target; else it feeds
// itself.
#include <algorithm>
#include <cerrno>
#include <random>
#include <span>
#include <vector>

#include "block.h"
#include "check.h"
#include "order.h"

namespace split_fuzz {

using namespace infinity::io;

namespace {

// Numbers from the fuzzer's bytes; zeros when they are used up.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  std::uint64_t number(std::uint64_t below) {
    std::uint64_t value = 0;
    for (int i = 0; i < 4 && !bytes_.empty(); ++i) {
      value = value << 8 | bytes_.front();
      bytes_ = bytes_.subspan(1);
    }
    return value % below;
  }
  [[nodiscard]] bool empty() const { return bytes_.empty(); }

 private:
  std::span<const std::uint8_t> bytes_;
};

std::uintptr_t address_of(const iovec& piece) {
  return reinterpret_cast<std::uintptr_t>(piece.iov_base);
}

struct Scene {
  File file;
  ArenaRange arena;
  std::uint32_t block_nbytes = 0;
  Operation operation = Operation::kRead;
};

Scene make_scene(Input& input) {
  Scene scene;
  scene.file.alignment_nbytes = input.number(2) == 0 ? 1 : 4096;
  scene.block_nbytes = static_cast<std::uint32_t>(4096 * (1 + input.number(64)));
  scene.arena = {kRegisteredBufferNbytes * 4, input.number(4) * (kRegisteredBufferNbytes / 2)};
  scene.operation = input.number(2) == 0 ? Operation::kRead : Operation::kWrite;
  return scene;
}

// Segments that begin at `start_nbytes`, every other one where the last one ends, in the order of
// the file, as the engine builds them.
void fill_part(Input& input, Scene& scene, std::uint64_t start_nbytes, Part& part) {
  const std::uint32_t alignment = scene.file.alignment_nbytes;
  part.operation = scene.operation;
  std::uint64_t at_nbytes = start_nbytes;
  for (std::uint64_t count = 1 + input.number(12); count > 0; --count) {
    Segment segment;
    segment.file = 0;
    segment.offset_nbytes = at_nbytes;
    segment.nbytes = (1 + input.number(input.number(2) == 0 ? 300 : 8)) * alignment;
    // Around the boundary of two registered buffers, where it is interesting.
    segment.address =
        kRegisteredBufferNbytes * (4 + input.number(3)) - input.number(300) * alignment;
    at_nbytes += segment.nbytes;
    switch (input.number(8)) {
      case 0: at_nbytes += input.number(300) * alignment; break;
      case 1: at_nbytes = segment.offset_nbytes; break;  // The next one overlaps.
      default: break;
    }
    part.segments.push_back(segment);
    part.files.push_back(&scene.file);
  }
  part.ranges = covered_ranges(part.segments);
}

// Where the byte of a block that is `at_nbytes` from its start lies in memory.
std::uintptr_t address_at(const std::vector<iovec>& pieces, std::uint64_t at_nbytes) {
  for (const iovec& piece : pieces) {
    if (at_nbytes < piece.iov_len) return address_of(piece) + at_nbytes;
    at_nbytes -= piece.iov_len;
  }
  CHECK(false);
  return 0;
}

void check_shape(const Block& block, const Scene& scene) {
  std::uint64_t sum_nbytes = 0;
  for (const iovec& piece : block.pieces) {
    CHECK(piece.iov_len > 0);
    CHECK(address_of(piece) % scene.file.alignment_nbytes == 0);
    CHECK(piece.iov_len % scene.file.alignment_nbytes == 0);
    sum_nbytes += piece.iov_len;
  }
  CHECK(sum_nbytes == block.nbytes && block.nbytes > 0 && block.nbytes <= scene.block_nbytes);
  CHECK(!block.pieces.empty() && block.pieces.size() <= kMaxPieces);
  CHECK(block.offset_nbytes % scene.file.alignment_nbytes == 0);
  const int buffer = registered_buffer(block, scene.arena);
  for (const iovec& piece : block.pieces) {
    if (buffer < 0) break;
    const std::uintptr_t first = address_of(piece) - scene.arena.address;
    CHECK(scene.arena.holds(address_of(piece), piece.iov_len));
    CHECK(first / kRegisteredBufferNbytes == static_cast<std::uint64_t>(buffer));
    CHECK((first + piece.iov_len - 1) / kRegisteredBufferNbytes ==
          static_cast<std::uint64_t>(buffer));
  }
}

std::int64_t answer(Input& input, const Block& block) {
  switch (input.number(8)) {
    case 0: return -EAGAIN;
    case 1: return -EINTR;
    case 2: return -EIO;
    case 3: return 0;
    case 4: return static_cast<std::int64_t>(1 + input.number(block.nbytes));
    default: return block.nbytes;
  }
}

// Carries a block through to its end. Returns whether all of it was moved.
bool carry_through(Input& input, Block block) {
  const std::vector<iovec> pieces = block.pieces;
  const std::uint64_t start_nbytes = block.offset_nbytes;
  const std::uint32_t total_nbytes = block.nbytes;
  std::uint64_t moved_nbytes = 0;
  std::uint32_t num_useless = 0;
  while (true) {
    const Judgement judgement = judge(block, answer(input, block));
    moved_nbytes += judgement.moved_nbytes;
    if (judgement.verdict == Verdict::kFailed) {
      CHECK(judgement.code > 0 && moved_nbytes < total_nbytes);
      return false;
    }
    if (judgement.verdict == Verdict::kDone) {
      CHECK(moved_nbytes == total_nbytes);
      return true;
    }
    CHECK(block.offset_nbytes == start_nbytes + moved_nbytes);
    CHECK(block.nbytes == total_nbytes - moved_nbytes && block.nbytes > 0);
    CHECK(block.offset_nbytes % block.file->alignment_nbytes == 0);
    std::uint64_t at_nbytes = moved_nbytes;  // What is left is what was behind it.
    for (const iovec& piece : block.pieces) {
      CHECK(piece.iov_len > 0 && address_of(piece) == address_at(pieces, at_nbytes));
      at_nbytes += piece.iov_len;
      CHECK(address_of(piece) + piece.iov_len - 1 == address_at(pieces, at_nbytes - 1));
    }
    CHECK(at_nbytes == total_nbytes);
    num_useless = judgement.moved_nbytes == 0 ? num_useless + 1 : 0;
    CHECK(num_useless <= kMaxRetries + 1);  // It ends.
  }
}

// Consumes a block's bytes of one part from a list of segments, byte for byte where each belongs.
class Cursor {
 public:
  explicit Cursor(const Part& part) : part_(part) {}

  [[nodiscard]] bool at_end() const { return index_ == part_.segments.size(); }
  [[nodiscard]] bool at_start_of_segment() const { return inside_nbytes_ == 0; }
  [[nodiscard]] const Segment& segment() const { return part_.segments[index_]; }

  // The bytes of `block` from `at_nbytes` on, as many as the part has, are the next ones.
  std::uint64_t consume(const Block& block, std::uint64_t at_nbytes) {
    while (!at_end() && at_nbytes < block.nbytes) {
      const std::uint64_t count =
          std::min(segment().nbytes - inside_nbytes_, block.nbytes - at_nbytes);
      CHECK(block.offset_nbytes + at_nbytes == segment().offset_nbytes + inside_nbytes_);
      const std::uintptr_t address = segment().address + inside_nbytes_;
      CHECK(address_at(block.pieces, at_nbytes) == address);
      CHECK(address_at(block.pieces, at_nbytes + count - 1) == address + count - 1);
      at_nbytes += count;
      inside_nbytes_ += count;
      if (inside_nbytes_ == segment().nbytes) {
        ++index_;
        inside_nbytes_ = 0;
      }
    }
    return at_nbytes;
  }

 private:
  const Part& part_;
  std::size_t index_ = 0;
  std::uint64_t inside_nbytes_ = 0;
};

void run(std::span<const std::uint8_t> bytes) {
  Input input(bytes);
  Scene scene = make_scene(input);
  Part part;
  fill_part(input, scene, input.number(1 << 20) * scene.file.alignment_nbytes, part);
  Cursor cursor(part);
  Block block;  // Filled again and again, as in a lane.
  while (!part.is_cut()) {
    const bool is_inside = !cursor.at_start_of_segment();
    shape_block(part, scene.block_nbytes, scene.arena, block);
    check_shape(block, scene);
    cut(part, block.nbytes);
    CHECK(cursor.consume(block, 0) == block.nbytes);
    CHECK(part.is_cut() == cursor.at_end());
    // Nothing that goes on, and fits, is left for a block of its own.
    if (!cursor.at_end() && cursor.at_start_of_segment()) {
      const Segment& next = cursor.segment();
      CHECK(next.offset_nbytes != block.offset_nbytes + block.nbytes ||
            next.nbytes > scene.block_nbytes - block.nbytes || block.pieces.size() == kMaxPieces);
    }
    if (!cursor.at_end() && !cursor.at_start_of_segment() && !is_inside) {
      CHECK(block.pieces.size() == 1);  // A segment is cut only when it is alone.
    }
    (void)carry_through(input, block);
  }
  Part next;
  const std::uint64_t end_nbytes = block.offset_nbytes + block.nbytes;
  const std::uint64_t gap_nbytes = input.number(4) == 0 ? scene.file.alignment_nbytes : 0;
  fill_part(input, scene, end_nbytes + gap_nbytes, next);
  const std::uint32_t before_nbytes = block.nbytes;
  if (extend_block(next, scene.block_nbytes, block)) {
    CHECK(gap_nbytes == 0);
    check_shape(block, scene);
    Cursor whole(next);
    CHECK(whole.consume(block, before_nbytes) == block.nbytes && whole.at_end());
    (void)carry_through(input, block);
  } else {
    CHECK(block.nbytes == before_nbytes);
    check_shape(block, scene);
  }
  const std::vector<FileRange>& ranges = part.ranges;
  for (std::size_t at = 1; at < ranges.size(); ++at) {
    CHECK(ranges[at - 1].end_nbytes < ranges[at].start_nbytes);
  }
  for (const Segment& segment : part.segments) {
    CHECK(overlap(ranges, covered_ranges({&segment, 1})));
  }
}

}  // namespace

#ifdef INFINITY_FUZZ

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t count) {
  run({bytes, count});
  return 0;
}

#else

TEST(RandomRequestsAreCutAndJudgedRight) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::uint8_t> bytes(random() % 400);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    run(bytes);
  }
}

#endif

}  // namespace split_fuzz

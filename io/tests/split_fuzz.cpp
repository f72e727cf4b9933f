// Fuzzes what cuts requests into blocks and judges the kernel's answers, against a device that
// answers anything. Built with INFINITY_FUZZ it is a libFuzzer target; else it feeds itself.
#include <cerrno>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "infinity_io/block.h"
#include "order.h"

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

struct Scene {
  File file;
  Part part;
  ArenaRange arena;
  std::uint32_t block_nbytes = 0;
};

Scene make_scene(Input& input) {
  Scene scene;
  const std::uint32_t alignment = input.number(2) == 0 ? 1 : 4096;
  scene.file.alignment_nbytes = alignment;
  scene.block_nbytes = static_cast<std::uint32_t>(4096 * (1 + input.number(64)));
  scene.arena = {kRegisteredBufferNbytes * 4, input.number(4) * (kRegisteredBufferNbytes / 2)};
  scene.part.operation = input.number(2) == 0 ? Operation::kRead : Operation::kWrite;
  for (std::uint64_t count = 1 + input.number(6); count > 0; --count) {
    Segment segment;
    segment.file = 0;
    segment.offset_nbytes = input.number(1 << 20) * alignment;
    segment.nbytes = (1 + input.number(300)) * alignment;
    // Around the boundary of two registered buffers, where it is interesting.
    segment.address = kRegisteredBufferNbytes * (4 + input.number(3)) -
                      input.number(300) * alignment;
    scene.part.segments.push_back(segment);
    scene.part.files.push_back(&scene.file);
  }
  return scene;
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
  const std::uint64_t end_nbytes = block.offset_nbytes + block.nbytes;
  const std::uintptr_t shift = block.address - block.offset_nbytes;
  const std::uint32_t total_nbytes = block.nbytes;
  std::uint64_t moved_nbytes = 0;
  std::uint32_t num_useless = 0;
  while (true) {
    const std::uint64_t before_nbytes = block.offset_nbytes;
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
    CHECK(block.offset_nbytes == before_nbytes + judgement.moved_nbytes);
    CHECK(block.offset_nbytes + block.nbytes == end_nbytes && block.nbytes > 0);
    CHECK(block.address == block.offset_nbytes + shift);
    CHECK(block.offset_nbytes % block.file->alignment_nbytes == 0);
    num_useless = judgement.moved_nbytes == 0 ? num_useless + 1 : 0;
    CHECK(num_useless <= kMaxRetries + 1);  // It ends.
  }
}

void run(std::span<const std::uint8_t> bytes) {
  Input input(bytes);
  Scene scene = make_scene(input);
  Part& part = scene.part;
  std::size_t index = 0;
  std::uint64_t cut_nbytes = 0;
  while (!part.is_cut()) {
    const Segment segment = part.segments[index];
    const std::uint32_t span = next_span(part, scene.block_nbytes, scene.arena);
    const Block block = cut_block(part, scene.block_nbytes, scene.arena);
    CHECK(block.nbytes == span && span > 0 && span <= scene.block_nbytes);
    CHECK(block.offset_nbytes == segment.offset_nbytes + cut_nbytes);
    CHECK(block.address == segment.address + cut_nbytes);
    CHECK(block.offset_nbytes % scene.file.alignment_nbytes == 0);
    if (scene.arena.holds(block.address, block.nbytes)) {
      const std::uintptr_t first = block.address - scene.arena.address;
      CHECK(first / kRegisteredBufferNbytes == (first + span - 1) / kRegisteredBufferNbytes);
    }
    (void)carry_through(input, block);
    cut_nbytes += span;
    CHECK(cut_nbytes <= segment.nbytes);
    if (cut_nbytes == segment.nbytes) {
      ++index;
      cut_nbytes = 0;
    }
  }
  CHECK(index == part.segments.size());
  const std::vector<FileRange> ranges = covered_ranges(part.segments);
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

int main() { return check::run_all_tests(); }

#endif

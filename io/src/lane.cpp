#include "lane.h"

#include <algorithm>
#include <bit>
#include <cerrno>

#include "order.h"

namespace infinity::io {

namespace {

// The smallest block that the window is meant to be filled with.
constexpr std::uint64_t kSmallBlockNbytes = 64 << 10;
constexpr std::uint64_t kMaxSlots = 256;

// Long enough that one slow block does not decide, short beside one pass of a model.
constexpr std::uint64_t kEpochBlocks = 32;

DepthControl control_of(const Options& options) noexcept {
  const std::uint32_t least =
      options.min_queue_depth == 0 ? options.queue_depth : options.min_queue_depth;
  return {options.queue_depth, least, max_depth(options)};
}

}  // namespace

Lane::Lane(const Options& options, std::shared_ptr<const Hooks> hooks)
    : options_(options),
      hooks_(std::move(hooks)),
      controls_{control_of(options), control_of(options), control_of(options)} {}

std::uint32_t max_depth(const Options& options) noexcept {
  return std::max(options.queue_depth, options.min_queue_depth == 0 ? 0 : options.max_queue_depth);
}

std::uint32_t max_in_flight(const Options& options) noexcept {
  const std::uint32_t depth = max_depth(options);
  const std::uint64_t window_nbytes = std::uint64_t{depth} * options.block_nbytes;
  const std::uint64_t small = std::min(kMaxSlots, window_nbytes / kSmallBlockNbytes);
  return std::max(depth, static_cast<std::uint32_t>(small));
}

std::uint32_t num_ring_entries(const Options& options) noexcept {
  return std::bit_ceil(max_in_flight(options) + 2);
}

LaneInfo Lane::info() const noexcept {
  std::lock_guard lock(mutex_);
  LaneInfo info = info_;
  info.stats.num_pending = parts_.size();
  info.stats.num_in_flight = num_in_flight_;
  info.stats.queue_depth = controls_[static_cast<std::size_t>(work_)].base();
  info.stats.cpu = cpu();
  return info;
}

FileStats Lane::stats_of(const File& file) const noexcept {
  std::lock_guard lock(mutex_);
  FileStats stats = file.stats;
  if (file.num_in_flight != 0) stats.busy += Clock::now() - file.busy_since;
  return stats;
}

bool Lane::has_room(Priority priority) const noexcept {
  std::lock_guard lock(mutex_);
  return num_pending_[static_cast<std::size_t>(priority)] < options_.max_pending;
}

bool Lane::wait_for_room(Priority priority, Clock::time_point deadline) noexcept {
  std::unique_lock lock(mutex_);
  const Clock::time_point start = Clock::now();
  const bool has_room = changed_.wait_until(
      lock, deadline, [&] { return num_pending(priority) < options_.max_pending; });
  info_.stats.stall += Clock::now() - start;
  return has_room;
}

// Compares the part with every unfinished one of the device: at most `max_pending` of each class,
// each with few ranges, all sorted. Thousands of comparisons are microseconds, where the blocks
// that they order take milliseconds; an index by range would have to be kept for each of them.
void Lane::enqueue(Part* part) noexcept {
  std::lock_guard lock(mutex_);
  INF_ASSERT(part->owner != nullptr && !part->is_cut() && part->num_in_flight == 0);
  INF_ASSERT(part->blockers.empty() && part->dependents.empty());
  // Linear in the unfinished parts. max_pending bounds their number, and a comparison takes a few
  // nanoseconds where the transfer takes milliseconds.
  for (Part* earlier : parts_) {
    // INV-13: requests that overlap keep their order, whatever their priorities.
    if (!conflict(*earlier, *part)) continue;
    earlier->dependents.push_back(part);
    part->blockers.push_back(earlier);
    raise(earlier, part->priority);
  }
  parts_.push_back(part);
  ++num_pending(part->submitted_as);
  for (File* file : part->files) ++file->num_parts;
  part->enqueued_at = Clock::now();
  if (part->blockers.empty()) push(part);
  if (death_code_ != 0) die(death_code_, death_detail_);
}

void Lane::push(Part* part) noexcept {
  queue_.push(part);
  if (death_code_ == 0) wake();
}

// A part is as urgent as those that wait for it, or a write-back would hold up a demand read.
void Lane::raise(Part* part, Priority priority) noexcept {
  if (part->priority <= priority) return;
  if (part->blockers.empty() && !part->is_cut()) {
    queue_.promote(part, priority);
  } else {
    part->priority = priority;
  }
  for (Part* blocker : part->blockers) raise(blocker, priority);
}

bool Lane::cancel(Part* part) noexcept {
  std::lock_guard lock(mutex_);
  if (part->owner == nullptr || part->is_cut()) return false;
  const Segment& segment = part->segments[part->segment_index];
  part->owner->fail({ECANCELED, part->operation, segment.file,
                     segment.offset_nbytes + part->cut_nbytes, segment.nbytes - part->cut_nbytes,
                     "cancelled; from here on nothing was given to the device"});
  ++info_.stats.num_cancelled;
  drop_rest(part);
  return true;
}

// Leaves nothing of the part to be issued.
void Lane::drop_rest(Part* part) noexcept {
  if (part->blockers.empty()) queue_.remove(part);
  for (Part* blocker : part->blockers) std::erase(blocker->dependents, part);
  part->blockers.clear();
  part->segment_index = part->segments.size();
  if (part->num_in_flight == 0) finish(part);
}

bool Lane::wait_idle(Clock::time_point deadline) noexcept {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return parts_.empty(); });
}

void Lane::wait_file_idle(const File& file) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&file] { return file.num_parts == 0; });
}

bool Lane::take(Block& block) noexcept {
  while (Part* part = queue_.choose()) {
    if (part->owner->failed()) {  // The rest of a failed request is not worth a transfer.
      drop_rest(part);
      continue;
    }
    shape_block(*part, options_.block_nbytes, options_.arena, block);
    // Nothing less urgent slips past a block that must wait for room.
    if (num_in_flight_ != 0 && num_in_flight_nbytes_ + block.nbytes > window_nbytes()) return false;
    const bool is_whole = part->segment_index == 0 && part->cut_nbytes == 0;
    block.issued_at = Clock::now();
    queue_.charge(part);
    cut(*part, block.nbytes);
    start(*part, block);
    if (is_whole && part->is_cut() && !part->is_alone) gather(block);
    ++num_in_flight_;
    num_in_flight_nbytes_ += block.nbytes;
    File& file = *block.file;
    if (file.num_in_flight++ == 0) file.busy_since = block.issued_at;
    file.stats.max_in_flight =
        std::max<std::uint64_t>(file.stats.max_in_flight, file.num_in_flight);
    return true;
  }
  return false;
}

// Only whole requests share a block: one that fails can then be taken apart.
void Lane::gather(Block& block) noexcept {
  const Priority priority = block.parts.front()->priority;
  const std::uint64_t room_nbytes =
      window_nbytes() - std::min(window_nbytes(), num_in_flight_nbytes_);
  const std::uint64_t limit_nbytes = std::min<std::uint64_t>(options_.block_nbytes, room_nbytes);
  while (Part* next = queue_.choose()) {
    const bool is_fresh = next->segment_index == 0 && next->cut_nbytes == 0 && !next->is_alone;
    if (next->priority != priority || !is_fresh || next->owner->failed()) return;
    if (!extend_block(*next, limit_nbytes, block)) return;
    next->segment_index = next->segments.size();
    start(*next, block);
  }
}

// `block` has just taken bytes of `part`.
void Lane::start(Part& part, Block& block) noexcept {
  block.parts.push_back(&part);
  if (part.is_cut()) queue_.remove(&part);
  if (!part.is_started) info_.stats.queue_wait.add(block.issued_at - part.enqueued_at);
  part.is_started = true;
  ++part.num_in_flight;
}

Verdict Lane::settle(Block& block, std::int64_t result) noexcept {
  if (hooks_->tamper) result = hooks_->tamper(block, result);
  const std::uint64_t offset_nbytes = block.offset_nbytes;
  const std::uint64_t nbytes = block.nbytes;
  const Judgement judgement = judge(block, result);
  std::lock_guard lock(mutex_);
  FileStats& stats = block.file->stats;
  const bool is_read = block.operation == Operation::kRead;
  (is_read ? stats.read_nbytes : stats.write_nbytes) += judgement.moved_nbytes;
  stats.num_retries += judgement.is_retry ? 1 : 0;
  stats.num_short_transfers += judgement.is_short ? 1 : 0;
  if (judgement.verdict == Verdict::kAgain) {
    INF_ASSERT(block.nbytes > 0 && block.nbytes <= nbytes);
    INF_ASSERT(num_in_flight_nbytes_ >= nbytes);
    num_in_flight_nbytes_ -= nbytes - block.nbytes;
    return Verdict::kAgain;
  }
  (is_read ? stats.num_reads : stats.num_writes) += 1;
  if (judgement.verdict == Verdict::kFailed) {
    if (block.parts.size() > 1) {
      ++stats.num_retries;
      take_apart(block);
    } else {
      ++stats.num_errors;
      block.parts.front()->owner->fail({judgement.code, block.operation, block.file->id,
                                        offset_nbytes, nbytes, judgement.detail});
    }
  }
  retire(block, nbytes);
  if (death_code_ != 0) die(death_code_, death_detail_);  // Nothing else takes what came back.
  return judgement.verdict;
}

// Whose fault it was is not known, and the answer to one request is never that of another.
void Lane::take_apart(Block& block) noexcept {
  for (Part* part : block.parts) {
    part->segment_index = 0;
    part->is_alone = true;
    push(part);
  }
}

void Lane::retire(Block& block, std::uint64_t nbytes) noexcept {
  File& file = *block.file;
  INF_ASSERT(file.num_in_flight > 0 && num_in_flight_ > 0);
  INF_ASSERT(num_in_flight_nbytes_ >= nbytes);
  const Clock::time_point now = Clock::now();
  const auto latency = now - block.issued_at;
  file.stats.in_flight += latency;
  const bool is_read = block.operation == Operation::kRead;
  (is_read ? file.stats.read_latency : file.stats.write_latency).add(latency);
  --num_in_flight_;
  num_in_flight_nbytes_ -= nbytes;
  INF_ASSERT(num_in_flight_ != 0 || num_in_flight_nbytes_ == 0);
  if (--file.num_in_flight == 0) file.stats.busy += now - file.busy_since;
  measure(is_read, nbytes, now);
  for (Part* part : block.parts) {
    INF_ASSERT(part->num_in_flight > 0);
    part->owner->note_block(file.id, block.issued_at, now);
    if (--part->num_in_flight == 0 && part->is_cut()) finish(part);
  }
  block.parts.clear();
}

// Counts a block that has come back. Only while blocks wait for the window does the depth, and
// nothing else, decide how fast they come.
void Lane::measure(bool is_read, std::uint64_t nbytes, Clock::time_point now) noexcept {
  if (options_.min_queue_depth == 0) return;
  if (queue_.empty()) {
    for (DepthControl& control : controls_) control.interrupt();
    epoch_ = {};
    return;
  }
  if (epoch_.skipped_nbytes < std::uint64_t{max_depth(options_)} * options_.block_nbytes) {
    epoch_.skipped_nbytes += nbytes;  // It was issued at another depth, perhaps.
    epoch_.begun_at = now;
    return;
  }
  (is_read ? epoch_.read_nbytes : epoch_.write_nbytes) += nbytes;
  if (epoch_.read_nbytes + epoch_.write_nbytes >= kEpochBlocks * options_.block_nbytes) {
    end_epoch(now);
  }
}

void Lane::end_epoch(Clock::time_point now) noexcept {
  const std::uint64_t nbytes = epoch_.read_nbytes + epoch_.write_nbytes;
  const std::chrono::duration<double> elapsed = now - epoch_.begun_at;
  const Work work = 8 * epoch_.read_nbytes >= 7 * nbytes    ? Work::kRead
                    : 8 * epoch_.write_nbytes >= 7 * nbytes ? Work::kWrite
                                                            : Work::kMixed;
  const std::uint32_t before = depth();
  DepthControl& control = controls_[static_cast<std::size_t>(work_)];
  if (work == work_ && elapsed.count() > 0) {
    control.note(static_cast<double>(nbytes) / elapsed.count());
  } else {
    control.interrupt();
    work_ = work;
  }
  const bool is_same = depth() == before;
  epoch_ = {};
  epoch_.begun_at = now;
  if (is_same) epoch_.skipped_nbytes = ~std::uint64_t{0};  // The next one goes on at once.
}

// Lets go of the part. Whoever waits for the lane is told after the request is done, so that an
// idle lane means done tickets.
void Lane::finish(Part* part) noexcept {
  INF_ASSERT(part->is_cut() && part->num_in_flight == 0 && part->blockers.empty());
  for (File* file : part->files) {
    INF_ASSERT(file->num_parts > 0);
    --file->num_parts;
  }
  const std::size_t num_erased = std::erase(parts_, part);
  INF_ASSERT(num_erased == 1 && num_pending(part->submitted_as) > 0);
  --num_pending(part->submitted_as);
  const std::vector<Part*> dependents = std::move(part->dependents);
  const std::shared_ptr<QueuedRequest> owner = std::move(part->owner);  // Keeps `part` alive, too.
  owner->finish_part();
  changed_.notify_all();
  for (Part* dependent : dependents) std::erase(dependent->blockers, part);
  for (Part* dependent : dependents) {
    if (dependent->blockers.empty()) push(dependent);
  }
  if (death_code_ != 0) die(death_code_, death_detail_);  // Nothing else will take them.
}

void Lane::die(int code, const char* detail) noexcept {
  death_code_ = code;
  death_detail_ = detail;
  while (Part* part = queue_.choose()) {
    const Segment& segment = part->segments[part->segment_index];
    part->owner->fail(
        {code, part->operation, segment.file, segment.offset_nbytes, segment.nbytes, detail});
    drop_rest(part);
  }
}

}  // namespace infinity::io

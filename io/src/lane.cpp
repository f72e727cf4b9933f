#include "lane.h"

namespace infinity::io {

using Clock = std::chrono::steady_clock;

LaneInfo Lane::info() const noexcept {
  std::lock_guard lock(mutex_);
  return info_;
}

FileStats Lane::stats_of(const File& file) const noexcept {
  std::lock_guard lock(mutex_);
  FileStats stats = file.stats;
  if (file.num_in_flight != 0) stats.busy += Clock::now() - file.busy_since;
  return stats;
}

void Lane::enqueue(Part* part) noexcept {
  std::lock_guard lock(mutex_);
  ++num_parts_;
  for (File* file : part->files) ++file->num_parts;
  queue_.push(part);
  if (death_code_ != 0) {
    die(death_code_, death_detail_);
  } else {
    wake();
  }
}

bool Lane::wait_idle(Clock::time_point deadline) noexcept {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return is_idle(); });
}

void Lane::wait_file_idle(const File& file) noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&file] { return file.num_parts == 0; });
}

bool Lane::take(Block& block) noexcept {
  while (Part* part = queue_.choose()) {
    if (part->owner->failed()) {  // The rest of a failed request is not worth a transfer.
      queue_.pop(part);
      part->segment_index = part->segments.size();
      if (part->num_in_flight == 0) finish(part);
      continue;
    }
    block = cut_block(*part, options_.block_nbytes, options_.arena);
    queue_.charge(part);
    if (part->is_cut()) queue_.pop(part);
    ++part->num_in_flight;
    if (block.file->num_in_flight++ == 0) block.file->busy_since = Clock::now();
    return true;
  }
  return false;
}

Verdict Lane::settle(Block& block, std::int64_t result) noexcept {
  const std::uint64_t offset_nbytes = block.offset_nbytes;
  const std::uint64_t nbytes = block.nbytes;
  const Judgement judgement = judge(block, result);
  std::lock_guard lock(mutex_);
  FileStats& stats = block.file->stats;
  const bool is_read = block.operation == Operation::kRead;
  (is_read ? stats.read_nbytes : stats.write_nbytes) += judgement.moved_nbytes;
  stats.num_retries += judgement.is_retry ? 1 : 0;
  stats.num_short_transfers += judgement.is_short ? 1 : 0;
  if (judgement.verdict == Verdict::kAgain) return Verdict::kAgain;
  (is_read ? stats.num_reads : stats.num_writes) += 1;
  if (judgement.verdict == Verdict::kFailed) {
    ++stats.num_errors;
    block.part->owner->fail({judgement.code, block.operation, block.file->id, offset_nbytes,
                             nbytes, judgement.detail});
  }
  retire(block);
  return judgement.verdict;
}

void Lane::retire(Block& block) noexcept {
  File& file = *block.file;
  INF_ASSERT(file.num_in_flight > 0 && block.part->num_in_flight > 0);
  if (--file.num_in_flight == 0) file.stats.busy += Clock::now() - file.busy_since;
  if (--block.part->num_in_flight == 0 && block.part->is_cut()) finish(block.part);
  block.part = nullptr;
}

// Lets go of the part. Whoever waits for the lane is told after the request is done, so that an
// idle lane means done tickets.
void Lane::finish(Part* part) noexcept {
  for (File* file : part->files) --file->num_parts;
  const std::shared_ptr<Request> owner = std::move(part->owner);  // Keeps `part` alive, too.
  owner->finish_part();
  --num_parts_;
  changed_.notify_all();
}

void Lane::die(int code, const char* detail) noexcept {
  death_code_ = code;
  death_detail_ = detail;
  while (Part* part = queue_.choose()) {
    queue_.pop(part);
    if (!part->is_cut()) {
      const Segment& segment = part->segments[part->segment_index];
      part->owner->fail({code, part->operation, segment.file, segment.offset_nbytes,
                         segment.nbytes, detail});
    }
    part->segment_index = part->segments.size();
    if (part->num_in_flight == 0) finish(part);
  }
}

}  // namespace infinity::io

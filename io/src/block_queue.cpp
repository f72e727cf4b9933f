#include "infinity_io/block_queue.h"

namespace infinity::io {

namespace {

constexpr std::size_t kWriteBack = static_cast<std::size_t>(Priority::kWriteBack);

}  // namespace

void BlockQueue::push(Part* part) noexcept {
  Fifo& fifo = fifos_[static_cast<std::size_t>(part->priority)];
  part->next = nullptr;
  (fifo.tail == nullptr ? fifo.head : fifo.tail->next) = part;
  fifo.tail = part;
}

Part* BlockQueue::most_urgent() const noexcept {
  for (const Fifo& fifo : fifos_) {
    if (fifo.head != nullptr) return fifo.head;
  }
  return nullptr;
}

Part* BlockQueue::choose() const noexcept {
  Part* write_back = fifos_[kWriteBack].head;
  if (write_back != nullptr && num_overtakes_ >= kMaxOvertakes) return write_back;
  return most_urgent();
}

void BlockQueue::charge(const Part* part) noexcept {
  const bool overtakes =
      part->priority != Priority::kWriteBack && fifos_[kWriteBack].head != nullptr;
  num_overtakes_ = overtakes ? num_overtakes_ + 1 : 0;
}

void BlockQueue::remove(Part* part) noexcept {
  Fifo& fifo = fifos_[static_cast<std::size_t>(part->priority)];
  Part* before = nullptr;
  for (Part* at = fifo.head; at != part; at = at->next) {
    INF_ASSERT(at != nullptr);
    before = at;
  }
  (before == nullptr ? fifo.head : before->next) = part->next;
  if (fifo.tail == part) fifo.tail = before;
  part->next = nullptr;
}

void BlockQueue::promote(Part* part, Priority priority) noexcept {
  remove(part);
  part->priority = priority;
  push(part);
}

}  // namespace infinity::io

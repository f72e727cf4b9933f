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

void BlockQueue::pop(Part* part) noexcept {
  Fifo& fifo = fifos_[static_cast<std::size_t>(part->priority)];
  INF_ASSERT(fifo.head == part);
  fifo.head = part->next;
  if (fifo.head == nullptr) fifo.tail = nullptr;
  part->next = nullptr;
}

}  // namespace infinity::io

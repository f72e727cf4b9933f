#include "block_queue.h"

namespace infinity::io {

void BlockQueue::push(Part* part) noexcept {
  Fifo& fifo = fifos_[static_cast<std::size_t>(part->priority)];
  part->next = nullptr;
  (fifo.tail == nullptr ? fifo.head : fifo.tail->next) = part;
  fifo.tail = part;
}

Part* BlockQueue::choose() const noexcept {
  Part* most_urgent = nullptr;
  for (std::size_t at = 0; at < kNumPriorities; ++at) {
    Part* head = fifos_[at].head;
    if (head != nullptr && num_overtakes_[at] >= kPatience[at]) return head;
    if (most_urgent == nullptr) most_urgent = head;
  }
  return most_urgent;
}

void BlockQueue::charge(const Part* part) noexcept {
  const std::size_t own = static_cast<std::size_t>(part->priority);
  for (std::size_t at = 0; at < kNumPriorities; ++at) {
    const bool is_overtaken = at != own && fifos_[at].head != nullptr;
    num_overtakes_[at] = is_overtaken ? num_overtakes_[at] + 1 : 0;
  }
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

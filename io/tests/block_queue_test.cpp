#include "block_queue.h"

#include <vector>

#include "check.h"

namespace block_queue_test {

using namespace infinity::io;

namespace {

Part* take(BlockQueue& queue) {
  Part* part = queue.choose();
  if (part != nullptr) {
    queue.charge(part);
    queue.remove(part);
  }
  return part;
}

}  // namespace

TEST(MoreUrgentGoesFirstAndOlderWithinOnePriority) {
  std::vector<Part> parts(6);
  const Priority priorities[] = {Priority::kState,    Priority::kWriteBack, Priority::kForward,
                                 Priority::kBackward, Priority::kForward,   Priority::kState};
  BlockQueue queue;
  for (std::size_t index = 0; index < parts.size(); ++index) {
    parts[index].priority = priorities[index];
    queue.push(&parts[index]);
  }
  for (const std::size_t expected : {2U, 4U, 3U, 0U, 5U, 1U})
    CHECK(take(queue) == &parts[expected]);
  CHECK(queue.empty());
  CHECK(take(queue) == nullptr);
}

TEST(WriteBackIsOvertakenEightTimesNotMore) {
  std::vector<Part> reads(20), writes(3);
  BlockQueue queue;
  for (Part& read : reads) queue.push(&read);
  for (Part& write : writes) {
    write.priority = Priority::kWriteBack;
    queue.push(&write);
  }
  std::vector<std::size_t> at;
  for (std::size_t turn = 0; turn < 23; ++turn) {
    if (take(queue)->priority == Priority::kWriteBack) at.push_back(turn);
  }
  CHECK((at == std::vector<std::size_t>{8, 17, 22}));
}

TEST(CopyWaitsForWriteBacksTooAndIsOvertakenSixteenTimes) {
  std::vector<Part> reads(40), writes(2), copies(2);
  BlockQueue queue;
  for (Part& read : reads) queue.push(&read);
  for (Part& write : writes) {
    write.priority = Priority::kWriteBack;
    queue.push(&write);
  }
  for (Part& copy : copies) {
    copy.priority = Priority::kCopy;
    queue.push(&copy);
  }
  std::vector<std::size_t> at;
  for (std::size_t turn = 0; turn < 44; ++turn) {
    if (take(queue)->priority == Priority::kCopy) at.push_back(turn);
  }
  CHECK((at == std::vector<std::size_t>{16, 33}));
}

TEST(OvertakingIsCountedOnlyWhileAWriteBackWaits) {
  std::vector<Part> reads(30);
  Part write;
  write.priority = Priority::kWriteBack;
  BlockQueue queue;
  for (Part& read : reads) queue.push(&read);
  for (int turn = 0; turn < 20; ++turn) CHECK(take(queue)->priority == Priority::kForward);
  queue.push(&write);
  for (int turn = 0; turn < 8; ++turn) CHECK(take(queue)->priority == Priority::kForward);
  CHECK(take(queue) == &write);
}

TEST(AnyQueuedPartCanBeRemoved) {
  for (const std::size_t victim : {0U, 1U, 2U}) {
    std::vector<Part> parts(3);
    BlockQueue queue;
    for (Part& part : parts) queue.push(&part);
    queue.remove(&parts[victim]);
    queue.push(&parts[victim]);  // The tail is right again.
    for (std::size_t index = 0; index < 3; ++index) {
      if (index != victim) CHECK(take(queue) == &parts[index]);
    }
    CHECK(take(queue) == &parts[victim]);
    CHECK(queue.empty());
  }
}

TEST(PromotedPartGoesBehindTheOthersOfItsNewClass) {
  std::vector<Part> parts(3);
  parts[0].priority = Priority::kWriteBack;
  parts[1].priority = Priority::kState;
  parts[2].priority = Priority::kForward;
  BlockQueue queue;
  for (Part& part : parts) queue.push(&part);
  queue.promote(&parts[0], Priority::kForward);
  CHECK(take(queue) == &parts[2]);
  CHECK(take(queue) == &parts[0]);
  CHECK(take(queue) == &parts[1]);
}

}  // namespace block_queue_test

// What happens between submit() and the device: order, urgency, cancellation, back-pressure.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include <pthread.h>

#include "fixtures.h"

namespace queue_test {

using namespace fixtures;

namespace {

// Holds back every answer of the kernel until it is opened, so that a queue can build up behind.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

// One block in flight at a time, answers only once the gate is open, and the order in which blocks
// are answered is kept.
struct Subject {
  Gate gate;
  std::mutex mutex;
  std::vector<std::uint64_t> offsets;
  TempFile file{8192 * kKiB};
  Memory memory{8192 * kKiB};
  std::unique_ptr<Engine> engine;
  std::int32_t id = -1;

  explicit Subject(Backend backend, std::uint32_t max_pending = 1024) {
    TestOptions options = options_for(backend);
    options.queue_depth = 1;
    options.max_pending = max_pending;
    options.tamper = [this](const Block& block, std::int64_t result) {
      gate.pass();
      std::lock_guard lock(mutex);
      offsets.push_back(block.offset_nbytes);
      return result;
    };
    engine = open_engine(options);
    id = open_file(*engine, file);
  }

  Ticket submit_at(Operation operation, std::uint64_t block, Priority priority,
                   std::uint64_t num_blocks = 1) {
    const std::uint64_t at = block * kBlockNbytes;
    return submit(*engine, operation, {{id, at, memory.address() + at, num_blocks * kBlockNbytes}},
                  priority);
  }

  // Fills the window with something that keeps its turn.
  Ticket plug() { return submit_at(Operation::kRead, 100, Priority::kForward); }

  void wait_until_in_flight() {
    while (engine->lanes()[0].stats.num_in_flight == 0) std::this_thread::yield();
  }

  std::vector<std::uint64_t> blocks() {
    std::vector<std::uint64_t> found;
    for (const std::uint64_t offset : offsets) found.push_back(offset / kBlockNbytes);
    return found;
  }
};

using Blocks = std::vector<std::uint64_t>;

}  // namespace

TEST(UrgentReadOvertakesQueuedWriteBack) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.plug();
    for (std::uint64_t at = 0; at < 3; ++at) {
      subject.submit_at(Operation::kWrite, at, Priority::kWriteBack);
    }
    subject.submit_at(Operation::kRead, 50, Priority::kForward);
    subject.gate.open();
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.blocks() == Blocks{100, 50, 0, 1, 2}));
  });
}

TEST(OverlappingRequestsKeepTheirOrderAndTheEarlierBecomesUrgent) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.memory.fill(9);
    std::vector<unsigned char> written(&subject.memory[5 * kBlockNbytes],
                                       &subject.memory[6 * kBlockNbytes]);
    subject.plug();
    subject.submit_at(Operation::kWrite, 1, Priority::kWriteBack);
    subject.submit_at(Operation::kWrite, 5, Priority::kWriteBack);
    Memory target(kBlockNbytes);
    const Ticket read = submit(*subject.engine, Operation::kRead,
                               {{subject.id, 5 * kBlockNbytes, target.address(), kBlockNbytes}});
    subject.submit_at(Operation::kWrite, 2, Priority::kState);
    subject.gate.open();
    wait(read);
    CHECK(std::memcmp(&target[0], written.data(), kBlockNbytes) == 0);
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.blocks() == Blocks{100, 5, 5, 2, 1}));
  });
}

TEST(OfTwoWritesToOnePlaceTheLaterStays) {
  on_each_backend([](Backend backend) {
    TempFile file(256 * kKiB);
    Memory memory(16 * 256 * kKiB), target(256 * kKiB);
    TestOptions options = options_for(backend);
    auto engine = open_engine(options);
    const std::int32_t id = open_file(*engine, file);
    for (unsigned round = 0; round < 16; ++round) {
      std::memset(&memory[round * 256 * kKiB], static_cast<int>(round + 1), 256 * kKiB);
      const auto priority = static_cast<Priority>(4 - round % 5);  // Later is often more urgent.
      submit(*engine, Operation::kWrite,
             {{id, 0, memory.address() + round * 256 * kKiB, 256 * kKiB}}, priority);
    }
    wait(submit(*engine, Operation::kRead, {{id, 0, target.address(), 256 * kKiB}}));
    for (std::size_t at = 0; at < 256 * kKiB; ++at) CHECK(target[at] == 16);
  });
}

TEST(CancelledRequestMovesNothingAndSaysSo) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.plug();
    const Ticket ticket = subject.submit_at(Operation::kWrite, 3, Priority::kState, 2);
    CHECK(ticket->cancel());
    CHECK(ticket->done());
    const Error error = ticket->error();
    CHECK(error.code == ECANCELED && error.file == subject.id);
    CHECK(error.offset_nbytes == 3 * kBlockNbytes && error.nbytes == 2 * kBlockNbytes);
    CHECK(!ticket->cancel());
    subject.gate.open();
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.blocks() == Blocks{100}));
    CHECK(subject.engine->lanes()[0].stats.num_cancelled == 1);
  });
}

TEST(CancellingWhatHasBegunWaitsForTheBlockInFlight) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    const Ticket ticket = subject.submit_at(Operation::kWrite, 0, Priority::kState, 3);
    subject.wait_until_in_flight();
    CHECK(ticket->cancel());
    CHECK(!ticket->done());  // Its buffer is still the device's.
    subject.gate.open();
    wait(ticket);
    CHECK(ticket->error().code == ECANCELED);
    CHECK(ticket->error().offset_nbytes == kBlockNbytes);
    CHECK((subject.blocks() == Blocks{0}));
  });
}

TEST(FinishedRequestCannotBeCancelled) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.gate.open();
    const Ticket ticket = subject.plug();
    wait(ticket);
    CHECK(!ticket->cancel());
    CHECK(!ticket->failed());
    subject.engine->close();
    CHECK(!ticket->cancel());
  });
}

TEST(RequestThatWaitsForACancelledOneGoesOn) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.plug();
    const Ticket first = subject.submit_at(Operation::kWrite, 0, Priority::kState);
    const Ticket second = subject.submit_at(Operation::kWrite, 0, Priority::kState);
    const Ticket third = subject.submit_at(Operation::kRead, 0, Priority::kState);
    CHECK(second->cancel() && first->cancel());
    CHECK(!third->done());
    subject.gate.open();
    wait(third);
    CHECK(!third->failed());
    CHECK((subject.blocks() == Blocks{100, 0}));
  });
}

TEST(FullQueueHoldsUpItsOwnPriorityOnly) {
  on_each_backend([](Backend backend) {
    Subject subject(backend, 4);
    for (std::uint64_t at = 0; at < 4; ++at) {
      subject.submit_at(Operation::kWrite, at, Priority::kWriteBack);
    }
    subject.wait_until_in_flight();
    const Segment segment{subject.id, 0, subject.memory.address(), kBlockNbytes};
    const auto refused =
        subject.engine->submit(Operation::kRead, {{segment}}, Priority::kWriteBack, 1ms);
    CHECK(!refused.ok() && refused.error().code == EAGAIN);
    CHECK(subject.engine->lanes()[0].stats.stall > 0ms);
    const Ticket urgent = subject.submit_at(Operation::kRead, 50, Priority::kForward);
    std::thread opener([&subject] {
      std::this_thread::sleep_for(20ms);
      subject.gate.open();
    });
    const Ticket late = subject.submit_at(Operation::kWrite, 9, Priority::kWriteBack);  // Waits.
    opener.join();
    wait(late);
    CHECK(!late->failed() && urgent->done());
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.blocks() == Blocks{0, 50, 1, 2, 3, 9}));
  });
}

TEST(SmallBlocksFillTheWindowByBytes) {
  on_each_backend([](Backend backend) {
    TempFile file(8192 * kKiB);
    Memory memory(8192 * kKiB);
    TestOptions options = options_for(backend);
    options.block_nbytes = 1024 * kKiB;
    options.queue_depth = 2;
    options.num_threads = 32;
    Gate gate;
    options.tamper = [&gate](const Block&, std::int64_t result) {
      gate.pass();
      return result;
    };
    auto engine = open_engine(options);
    const std::int32_t id = open_file(*engine, file);
    std::vector<Segment> scattered;
    for (std::uint64_t at = 0; at < 64; ++at) {  // Every other 64 KiB, so that nothing merges.
      scattered.push_back({id, at * 128 * kKiB, memory.address() + at * 128 * kKiB, 64 * kKiB});
    }
    const Ticket ticket = submit(*engine, Operation::kRead, scattered);
    for (int tries = 0; engine->lanes()[0].stats.num_in_flight < 32 && tries < 100000; ++tries) {
      std::this_thread::sleep_for(1ms);
    }
    CHECK(engine->lanes()[0].stats.num_in_flight == 32);
    gate.open();
    wait(ticket);
    CHECK(!ticket->failed());
    const FileStats stats = engine->stats()[0].stats;
    CHECK(stats.max_in_flight == 32 && stats.num_reads == 64);
  });
}

TEST(SegmentsThatContinueEachOtherBecomeOneBlock) {
  on_each_backend([](Backend backend) {
    TempFile file(1024 * kKiB);
    Memory memory(1024 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    std::vector<Segment> pages;
    for (std::uint64_t at = 0; at < 256; ++at) {
      pages.push_back({id, at * 4096, memory.address() + at * 4096, 4096});
    }
    wait(submit(*engine, Operation::kRead, pages));
    CHECK(engine->stats()[0].stats.num_reads == 16);
  });
}

TEST(SegmentsScatteredInMemoryTravelTogetherWhereTheyTouchInTheFile) {
  on_each_backend([](Backend backend) {
    for (const bool is_registered : {false, true}) {
      TempFile file(1024 * kKiB);
      Memory source(1024 * kKiB), target(1024 * kKiB);
      source.fill(5);
      TestOptions options = options_for(backend);
      if (is_registered) options.arena = target.range();
      auto engine = open_engine(options);
      const std::int32_t id = open_file(*engine, file);
      std::vector<Segment> pages, back;
      for (std::uint64_t at = 0; at < 256; ++at) {
        const std::uint64_t place = at * 101 % 256;  // 101 and 256 have no common factor.
        pages.push_back({id, place * 4096, source.address() + at * 4096, 4096});
        back.push_back({id, at * 101 % 256 * 4096, target.address() + at * 4096, 4096});
      }
      wait(submit(*engine, Operation::kWrite, pages));
      wait(submit(*engine, Operation::kRead, back));
      CHECK(std::memcmp(&source[0], &target[0], 1024 * kKiB) == 0);
      const FileStats stats = engine->stats()[0].stats;
      CHECK(stats.num_writes == 16 && stats.num_reads == 16);
    }
  });
}

TEST(SmallRequestsThatTouchInTheFileShareABlock) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.memory.fill(3);
    std::vector<unsigned char> source(&subject.memory[0], &subject.memory[0] + 8 * 4096);
    subject.plug();
    subject.wait_until_in_flight();
    std::vector<Ticket> tickets;
    for (std::uint64_t at = 0; at < 8; ++at) {
      tickets.push_back(submit(
          *subject.engine, Operation::kWrite,
          {{subject.id, at * 4096, subject.memory.address() + at * 4096, 4096}}, Priority::kState));
    }
    subject.gate.open();
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.blocks() == Blocks{100, 0}));
    for (const Ticket& ticket : tickets) {
      CHECK(ticket->done() && !ticket->failed());
      CHECK(ticket->passages()[0].has_moved() && ticket->passages()[0].nbytes == 4096);
    }
    wait(submit(*subject.engine, Operation::kRead,
                {{subject.id, 0, subject.memory.address() + 64 * 4096, 8 * 4096}}));
    CHECK(std::memcmp(&subject.memory[64 * 4096], source.data(), source.size()) == 0);
  });
}

TEST(RequestsOfOtherUrgencyOrDirectionShareNoBlock) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.plug();
    subject.wait_until_in_flight();
    const auto submit_page = [&](Operation operation, std::uint64_t page, Priority priority) {
      submit(*subject.engine, operation,
             {{subject.id, page * 4096, subject.memory.address() + page * 4096, 4096}}, priority);
    };
    submit_page(Operation::kRead, 0, Priority::kForward);
    submit_page(Operation::kRead, 1, Priority::kState);
    submit_page(Operation::kWrite, 2, Priority::kState);
    subject.gate.open();
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.offsets == std::vector<std::uint64_t>{100 * kBlockNbytes, 0, 4096, 8192}));
  });
}

TEST(OnlyWholeRequestsShareABlock) {
  on_each_backend([](Backend backend) {
    Subject subject(backend);
    subject.plug();
    subject.wait_until_in_flight();
    constexpr std::uint64_t kHalf = kBlockNbytes / 2;
    submit(*subject.engine, Operation::kRead,
           {{subject.id, 0, subject.memory.address(), 3 * kHalf}}, Priority::kState);
    submit(*subject.engine, Operation::kRead,
           {{subject.id, 3 * kHalf, subject.memory.address(), kHalf}}, Priority::kState);
    subject.gate.open();
    CHECK(subject.engine->drain(kTimeLimit));
    CHECK((subject.offsets ==
           std::vector<std::uint64_t>{100 * kBlockNbytes, 0, kBlockNbytes, 3 * kHalf}));
  });
}

// The drive has one bad page; eight requests of a page each share the block that meets it.
TEST(ASharedBlockThatFailsIsTakenApart) {
  on_each_backend([](Backend backend) {
    constexpr std::uint64_t kBadPage = 5;
    TempFile file(1024 * kKiB);
    Memory memory(1024 * kKiB);
    Gate gate;
    std::atomic<int> num_answers{0};
    TestOptions options = options_for(backend);
    options.queue_depth = 1;
    options.tamper = [&](const Block& block, std::int64_t result) -> std::int64_t {
      gate.pass();
      ++num_answers;
      const std::uint64_t bad = kBadPage * 4096;
      const bool is_hit = block.offset_nbytes <= bad && bad < block.offset_nbytes + block.nbytes;
      return is_hit ? -EIO : result;
    };
    auto engine = open_engine(options);
    const std::int32_t id = open_file(*engine, file);
    submit(*engine, Operation::kRead, {{id, 512 * kKiB, memory.address(), kBlockNbytes}});
    while (engine->lanes()[0].stats.num_in_flight == 0) std::this_thread::yield();
    std::vector<Ticket> tickets;
    for (std::uint64_t page = 0; page < 8; ++page) {
      tickets.push_back(
          submit(*engine, Operation::kRead, {{id, page * 4096, memory.address(), 4096}}));
    }
    gate.open();
    CHECK(engine->drain(kTimeLimit));
    CHECK(num_answers == 1 + 1 + 8);  // The plug, the shared block, and each on its own.
    for (std::uint64_t page = 0; page < 8; ++page) {
      CHECK(tickets[page]->failed() == (page == kBadPage));
    }
    const Error error = tickets[kBadPage]->error();
    CHECK(error.code == EIO && error.offset_nbytes == kBadPage * 4096 && error.nbytes == 4096);
    const FileStats stats = engine->stats()[0].stats;
    CHECK(stats.num_errors == 1 && stats.num_retries == 1);
  });
}

TEST(RingFlagsAreThoseThatWereAskedFor) {
  for (const RingFlags wanted : {RingFlags::kDefer, RingFlags::kCoop, RingFlags::kNone}) {
    const UringProbe probe = probe_uring(wanted);
    if (!probe.usable) continue;  // An older kernel, or none that may be used.
    TempFile file(256 * kKiB);
    Memory memory(256 * kKiB);
    TestOptions options = options_for(Backend::kUring);
    options.ring_flags = wanted;
    auto engine = open_engine(options);
    const std::int32_t id = open_file(*engine, file);
    wait(submit(*engine, Operation::kRead, {{id, 0, memory.address(), 256 * kKiB}}));
    CHECK(engine->lanes()[0].ring_flags == probe.ring_flags);
    CHECK((probe.ring_flags == 0) == (wanted == RingFlags::kNone));
  }
}

TEST(StatisticsSurviveTheFileAndTheEngine) {
  on_each_backend([](Backend backend) {
    TempFile file(256 * kKiB);
    Memory memory(256 * kKiB);
    auto engine = open_engine(options_for(backend));
    for (int round = 0; round < 3; ++round) {
      const std::int32_t id = open_file(*engine, file);
      wait(submit(*engine, Operation::kRead, {{id, 0, memory.address(), 256 * kKiB}}));
      CHECK(!engine->close_file(id));
    }
    engine->close();
    const std::vector<FileReport> reports = engine->stats();
    CHECK(reports.size() == 1 && !reports[0].is_open);
    const FileStats& stats = reports[0].stats;
    CHECK(stats.read_nbytes == 768 * kKiB && stats.num_reads == 12);
    std::uint64_t counted = 0;
    for (const std::uint64_t count : stats.read_latency.counts) counted += count;
    CHECK(counted == 12);
    CHECK(stats.in_flight >= stats.busy && stats.busy > 0ns);
    CHECK(engine->lanes().size() == 1 && engine->lanes()[0].stats.cpu > 0ns);
  });
}

}  // namespace queue_test

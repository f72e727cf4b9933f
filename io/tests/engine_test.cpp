#include "infinity_io/engine.h"

#include <cerrno>
#include <cstring>
#include <thread>

#include "fixtures.h"

namespace engine_test {

using namespace fixtures;

TEST(WhatWasWrittenIsReadBack) {
  on_each_backend([](Backend backend) {
    TempFile file(1024 * kKiB);
    Memory source(1024 * kKiB), target(1024 * kKiB);
    source.fill(1);
    TestOptions options = options_for(backend);
    options.arena = target.range();  // One side through registered buffers, one through plain ones.
    auto engine = open_engine(options);
    const std::int32_t id = open_file(*engine, file);
    wait(submit(*engine, Operation::kWrite, {{id, 0, source.address(), 1024 * kKiB}}));
    wait(submit(*engine, Operation::kRead,
                {{id, 512 * kKiB, target.address() + 512 * kKiB, 512 * kKiB},
                 {id, 0, target.address(), 512 * kKiB}}));
    CHECK(std::memcmp(&source[0], &target[0], 1024 * kKiB) == 0);
    const FileStats stats = engine->stats()[0].stats;
    CHECK(stats.write_nbytes == 1024 * kKiB && stats.read_nbytes == 1024 * kKiB);
    CHECK(stats.num_writes == 16 && stats.num_reads == 16 && stats.num_errors == 0);
    CHECK(stats.busy > 0ns);
  });
}

TEST(ReadingPastTheEndFailsAndNamesTheRange) {
  on_each_backend([](Backend backend) {
    TempFile file(128 * kKiB);
    Memory target(256 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    const Ticket ticket =
        submit(*engine, Operation::kRead, {{id, 64 * kKiB, target.address(), 256 * kKiB}});
    wait(ticket);
    const Error error = ticket->error();
    CHECK(error.code == EIO && error.operation == Operation::kRead && error.file == id);
    CHECK(error.offset_nbytes >= 128 * kKiB && error.nbytes == kBlockNbytes);
    CHECK(ticket->error_path() == file.path());
    CHECK(engine->drain(kTimeLimit));
  });
}

TEST(OneFailureDoesNotHurtOtherRequests) {
  on_each_backend([](Backend backend) {
    constexpr std::uint64_t kNumRounds = 20;
    TempFile file(512 * kKiB);
    Memory target(kNumRounds * 512 * kKiB), unused(512 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    std::vector<Ticket> good, bad;
    for (std::uint64_t round = 0; round < kNumRounds; ++round) {
      bad.push_back(
          submit(*engine, Operation::kRead, {{id, 2048 * kKiB, unused.address(), 512 * kKiB}}));
      good.push_back(submit(*engine, Operation::kRead,
                            {{id, 0, target.address() + round * 512 * kKiB, 512 * kKiB}}));
    }
    for (const Ticket& ticket : bad) {
      wait(ticket);
      CHECK(ticket->failed());
    }
    for (const Ticket& ticket : good) {
      wait(ticket);
      CHECK(!ticket->failed());
    }
  });
}

TEST(UnreadableMemoryIsAnErrorNotACrash) {
  on_each_backend([](Backend backend) {
    TempFile file(64 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    const Ticket ticket = submit(*engine, Operation::kRead, {{id, 0, 4096, 4096}});
    wait(ticket);
    CHECK(ticket->error().code == EFAULT);
  });
}

TEST(UnknownAndClosedFilesAreRefused) {
  on_each_backend([](Backend backend) {
    TempFile file(64 * kKiB);
    Memory target(64 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    const Segment segment{id, 0, target.address(), 4096};
    CHECK(!engine->close_file(id));
    CHECK(engine->submit(Operation::kRead, {{segment}}, Priority::kForward).error().code == EBADF);
    CHECK(engine->close_file(id).code == EBADF);
    CHECK(engine->sync(-1).code == EBADF);
    CHECK(engine->open_file("no/such/file", false).error().code == ENOENT);
    CHECK(open_file(*engine, file) != id);
    engine->close();
    engine->close();
    CHECK(engine->open_file(file.path(), false).error().code == EBADF);
  });
}

TEST(ClosingWaitsForWorkWhoseTicketsWereThrownAway) {
  on_each_backend([](Backend backend) {
    TempFile file(4096 * kKiB);
    Memory source(4096 * kKiB);
    source.fill(2);
    {
      auto engine = open_engine(options_for(backend));
      const std::int32_t id = open_file(*engine, file);
      for (std::uint64_t at = 0; at < 4096 * kKiB; at += 256 * kKiB) {
        submit(*engine, Operation::kWrite, {{id, at, source.address() + at, 256 * kKiB}},
               Priority::kWriteBack);
      }
    }
    Memory target(4096 * kKiB);
    auto engine = open_engine(options_for(backend));
    wait(submit(*engine, Operation::kRead,
                {{open_file(*engine, file), 0, target.address(), 4096 * kKiB}}));
    CHECK(std::memcmp(&source[0], &target[0], 4096 * kKiB) == 0);
  });
}

TEST(FilesOpenAndCloseWhileOthersWork) {
  on_each_backend([](Backend backend) {
    TempFile steady_file(1024 * kKiB), passing_file(64 * kKiB);
    Memory target(1024 * kKiB), small(64 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t steady = open_file(*engine, steady_file);
    std::vector<Ticket> tickets;
    for (int round = 0; round < 100; ++round) {  // More than there are slots in the ring's table.
      tickets.push_back(
          submit(*engine, Operation::kWrite, {{steady, 0, target.address(), 1024 * kKiB}}));
      const std::int32_t passing = open_file(*engine, passing_file);
      submit(*engine, Operation::kWrite, {{passing, 0, small.address(), 64 * kKiB}});
      CHECK(!engine->close_file(passing));
    }
    for (const Ticket& ticket : tickets) {
      wait(ticket);
      CHECK(!ticket->failed());
    }
  });
}

TEST(ManyThreadsShareOneEngine) {
  on_each_backend([](Backend backend) {
    constexpr std::size_t kNumThreads = 4;
    constexpr std::uint64_t kShareNbytes = 256 * kKiB;
    TempFile file(kNumThreads * kShareNbytes);
    auto engine = open_engine(options_for(backend));
    const std::int32_t id = open_file(*engine, file);
    std::vector<std::thread> threads;
    for (std::size_t index = 0; index < kNumThreads; ++index) {
      threads.emplace_back([&, index] {
        Memory source(kShareNbytes), target(kShareNbytes);
        for (unsigned round = 0; round < 20; ++round) {
          source.fill(round * 7 + static_cast<unsigned>(index));
          const std::uint64_t offset = index * kShareNbytes;
          wait(submit(*engine, Operation::kWrite, {{id, offset, source.address(), kShareNbytes}},
                      Priority::kWriteBack));
          wait(submit(*engine, Operation::kRead, {{id, offset, target.address(), kShareNbytes}}));
          CHECK(std::memcmp(&source[0], &target[0], kShareNbytes) == 0);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(engine->drain(kTimeLimit));
  });
}

TEST(ARequestKnowsWhenItsBytesWereMovedInEachFile) {
  on_each_backend([](Backend backend) {
    TempFile first_file(512 * kKiB), second_file(512 * kKiB);
    Memory target(512 * kKiB);
    auto engine = open_engine(options_for(backend));
    const std::int32_t first = open_file(*engine, first_file);
    const std::int32_t second = open_file(*engine, second_file);
    const auto before = std::chrono::steady_clock::now();
    const Ticket ticket = submit(*engine, Operation::kRead,
                                 {{first, 0, target.address(), 256 * kKiB},
                                  {second, 0, target.address() + 256 * kKiB, 128 * kKiB},
                                  {first, 384 * kKiB, target.address() + 384 * kKiB, 64 * kKiB}});
    wait(ticket);
    const auto after = std::chrono::steady_clock::now();
    CHECK(ticket->passages().size() == 2);
    for (const Passage& passage : ticket->passages()) {
      CHECK(passage.file == first || passage.file == second);
      CHECK(passage.nbytes == (passage.file == first ? 320 : 128) * kKiB);
      CHECK(before <= passage.issued_at && passage.issued_at <= passage.completed_at);
      CHECK(passage.completed_at <= after);
    }
  });
}

TEST(AnEmptyRequestIsDoneAtOnce) {
  on_each_backend([](Backend backend) {
    auto engine = open_engine(options_for(backend));
    CHECK(submit(*engine, Operation::kRead, {})->done());
  });
}

}  // namespace engine_test

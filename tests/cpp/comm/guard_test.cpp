// Ranks that do not do the same, do not come, or leave: every rank learns what the others were doing, and nothing
// hangs.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/limits.h"
#include "support/ranks.h"

namespace zc::comm {
namespace {

struct Fate {
  std::string error;  // of the body's Error; empty when it returned
  ErrorKind kind = ErrorKind::kInternal;
  Clock::duration took{};
  std::string failure;  // the communicator's, at the end
};

// What became of each rank.
std::vector<Fate> fates(const char* backend, int size, milliseconds timeout,
                        const std::function<void(Communicator&)>& body) {
  const auto world = test::make_world(backend, size, {timeout});
  std::vector<Fate> all(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Fate& fate = all[static_cast<std::size_t>(rank)];
      const auto start = Clock::now();
      try {
        body(*world[static_cast<std::size_t>(rank)]);
      } catch (const Error& error) {
        fate.error = error.what();
        fate.kind = error.kind();
      }
      fate.took = Clock::now() - start;
      fate.failure = world[static_cast<std::size_t>(rank)]->failure();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

void sum(Communicator& comm, std::size_t numel, std::string_view label) {
  std::vector<std::int64_t> values(numel);
  comm.all_reduce(values, ReduceOp::kSum, label).wait();
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "it says: " << (text)

class GuardTest : public testing::TestWithParam<const char*> {};

TEST_P(GuardTest, DifferentCollectivesAreNamedOnEveryRank) {
  const auto all = fates(GetParam(), 3, kLong, [](Communicator& comm) {
    comm.set_activity("step 41");
    if (comm.rank() == 0) {
      comm.set_activity("");
      comm.barrier("save_checkpoint").wait();
    } else {
      sum(comm, 5, "reduce bucket 7 (layers.3.mlp.*)");
    }
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error,
                "[comm] ranks are in different collectives: rank 0 is in save_checkpoint [barrier, call 1]");
    EXPECT_SAYS(fate.error,
                "rank 2 is in step 41, reduce bucket 7 (layers.3.mlp.*) [all_reduce (sum) of 5 int64, call 1]");
    EXPECT_LT(fate.took, seconds(5));
  }
}

TEST_P(GuardTest, EachPartOfACallIsCompared) {
  const std::vector<std::function<void(Communicator&)>> bodies = {
      [](Communicator& comm) { sum(comm, comm.rank() == 0 ? 4 : 5, "same"); },
      [](Communicator& comm) { sum(comm, 4, comm.rank() == 0 ? "one" : "other"); },
      [](Communicator& comm) {
        std::int64_t value = 0;
        comm.all_reduce({&value, 1}, comm.rank() == 0 ? ReduceOp::kSum : ReduceOp::kMax, "same").wait();
      },
      [](Communicator& comm) {
        std::array<float, 4> data{};
        comm.broadcast({data.data(), 4, DType::kF32, {}}, comm.rank(), "same").wait();
      },
      [](Communicator& comm) {
        std::array<float, 4> data{};
        comm.all_gather({data.data(), 4, comm.rank() == 0 ? DType::kF32 : DType::kBF16, {}}, "same").wait();
      },
      [](Communicator& comm) {
        std::array<float, 4> bucket{}, shard{};
        comm.reduce_scatter_add({bucket.data(), 4, DType::kF32, {}},
                                {shard.data(), 2, comm.rank() == 0 ? DType::kF32 : DType::kBF16, {}}, "same")
            .wait();
      },
      [](Communicator& comm) {  // one rank has made a call more
        if (comm.rank() == 0) comm.barrier("first").wait();
        comm.barrier("second").wait();
      },
  };
  for (const auto& body : bodies) {
    for (const Fate& fate : fates(GetParam(), 2, kLong, body))
      EXPECT_SAYS(fate.error, "ranks are in different collectives");
  }
}

TEST_P(GuardTest, DifferentShardDtypesAreNamed) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    std::array<float, 4> bucket{}, shard{};
    const DType dtype = comm.rank() == 0 ? DType::kF16 : DType::kBF16;
    comm.reduce_scatter_add({bucket.data(), 4, DType::kBF16, {}}, {shard.data(), 2, dtype, {}}, "reduce").wait();
  });
  for (const Fate& fate : all) {
    EXPECT_SAYS(fate.error, "rank 0 is in reduce [reduce_scatter_add of 4 bf16 into fp16, call 1]");
    EXPECT_SAYS(fate.error, "rank 1 is in reduce [reduce_scatter_add of 4 bf16, call 1]");
  }
}

TEST_P(GuardTest, AMissingRankIsNamedAfterTheTimeout) {
  const auto all = fates(GetParam(), 3, milliseconds(300), [](Communicator& comm) {
    comm.set_activity("step 3");
    sum(comm, 1, "count samples");
    if (comm.rank() == 1) std::this_thread::sleep_for(milliseconds(900));
    sum(comm, 1, "agree on the norm");
  });
  for (const int rank : {0, 2}) {
    const Fate& fate = all[static_cast<std::size_t>(rank)];
    if (fate.error.find("timed out") == std::string::npos) {  // the other was first and told
      EXPECT_SAYS(fate.error, "reports a failure ([comm] timed out");
      continue;
    }
    EXPECT_SAYS(fate.error, "[comm] timed out after 0.3 s in step 3, agree on the norm: rank 1 did not arrive.");
    EXPECT_SAYS(fate.error, "rank 0 is in step 3, agree on the norm");
    EXPECT_SAYS(fate.error, "rank 1 has not arrived (it was last in step 3, count samples)");
    EXPECT_SAYS(fate.error, "raise comm.timeout_ms, now 300");
    EXPECT_GE(fate.took, milliseconds(300));
  }
  EXPECT_SAYS(all[1].error, "reports a failure ([comm] timed out after 0.3 s");
}

TEST_P(GuardTest, ARankThatRaisesIsQuoted) {
  const auto all = fates(GetParam(), 3, kLong, [](Communicator& comm) {
    comm.set_activity("step 9");
    if (comm.rank() == 2) {
      comm.leave(Departure::kFailed, "raised ValueError: bad sample", milliseconds(100));
    } else {
      sum(comm, 1, "reduce bucket 0");
    }
  });
  for (const int rank : {0, 1}) {
    const Fate& fate = all[static_cast<std::size_t>(rank)];
    EXPECT_SAYS(fate.error,
                "[comm] rank 2 has left (raised ValueError: bad sample) while others need it: rank 0 is in");
    EXPECT_SAYS(fate.error, "step 9, reduce bucket 0");
    EXPECT_LT(fate.took, seconds(5));
  }
}

TEST_P(GuardTest, ARankAloneInACollectiveLearnsThatTheOthersEnded) {
  const auto all = fates(GetParam(), 3, kLong, [](Communicator& comm) {
    if (comm.rank() != 0) {
      comm.leave(Departure::kEnded, "ended its script", kLong);
      return;
    }
    try {
      comm.barrier("one too many").wait();
    } catch (const Error& error) {
      comm.leave(Departure::kFailed, "raised CommError", kLong);
      throw;
    }
  });
  EXPECT_SAYS(all[0].error, "has left (ended its script) while others need it: rank 0 is in one too many (this rank)");
  for (const int rank : {1, 2}) {
    EXPECT_SAYS(all[static_cast<std::size_t>(rank)].failure, "[comm] rank 0 has failed: ");
    EXPECT_LT(all[static_cast<std::size_t>(rank)].took, seconds(5));
  }
}

TEST_P(GuardTest, LeavingEndsThisRanksOwnCollectives) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    if (comm.rank() == 1) return;  // never comes; its hub end lives on
    const Work pending = comm.barrier("alone");
    const Work queued = comm.barrier("later");
    comm.leave(Departure::kFailed, "raised KeyboardInterrupt", milliseconds(50));
    comm.leave(Departure::kEnded, "again", kLong);  // idempotent
    EXPECT_THROW(queued.wait(), Error);
    pending.wait();
  });
  EXPECT_SAYS(all[0].error,
              "[comm] this rank has left (raised KeyboardInterrupt): no collective is possible any more.");
  EXPECT_LT(all[0].took, seconds(5));
}

TEST_P(GuardTest, AfterAFailureEveryCommunicatorOfTheRankIsBroken) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    const auto group = comm.split(0, comm.rank());
    std::string first;
    try {
      sum(*group, 1, comm.rank() == 0 ? "here" : "there");
    } catch (const Error& error) {
      first = error.what();
    }
    EXPECT_SAYS(first, "ranks are in different collectives");
    EXPECT_EQ(comm.failure(), first);
    const auto start = Clock::now();
    for (Communicator* each : {&comm, group.get()}) {
      try {
        each->barrier("again").wait();
        ADD_FAILURE() << "a broken communicator works";
      } catch (const Error& error) {
        EXPECT_EQ(error.what(), first);
      }
    }
    EXPECT_LT(Clock::now() - start, milliseconds(400));
  });
  for (const Fate& fate : all) EXPECT_EQ(fate.error, "");
}

TEST_P(GuardTest, PlacesInTheCallersCodeAreAskedForOnFailureOnly) {
  const auto all = fates(GetParam(), 3, kLong, [](Communicator& comm) {
    std::atomic<int> times_asked{0};
    comm.promise_place();
    std::thread teller([&] {
      while (comm.place_wanted()) {
        ++times_asked;
        comm.tell_place("train.py:" + std::to_string(10 + comm.rank()));
      }
    });
    comm.barrier("fine").wait();
    EXPECT_EQ(times_asked, 0);
    std::string error;
    try {
      comm.barrier(comm.rank() == 1 ? "here" : "there").wait();
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_EQ(times_asked, 1);
    comm.leave(Departure::kFailed, "raised CommError", seconds(5));
    teller.join();
    throw Error(ErrorKind::kComm, error);
  });
  EXPECT_SAYS(all[0].error,
              " In Python: rank 0 at train.py:10 (this rank); rank 1 at train.py:11; rank 2 at train.py:12.");
  EXPECT_SAYS(all[2].error,
              " In Python: rank 0 at train.py:10; rank 1 at train.py:11; rank 2 at train.py:12 (this rank).");
}

TEST_P(GuardTest, ARankThatCannotTellItsPlaceHoldsNobodyUp) {
  const auto start = Clock::now();
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    comm.promise_place();
    std::thread teller([&] {
      while (comm.place_wanted()) {
        if (comm.rank() == 0) comm.tell_place("train.py:10");  // rank 1 does not get to answer
      }
    });
    std::string error;
    try {
      comm.barrier(comm.rank() == 1 ? "here" : "there").wait();
    } catch (const Error& caught) {
      error = caught.what();
    }
    comm.leave(Departure::kFailed, "raised CommError", seconds(5));
    teller.join();
    throw Error(ErrorKind::kComm, error);
  });
  EXPECT_SAYS(all[0].error, " In Python: rank 0 at train.py:10 (this rank).");
  EXPECT_SAYS(all[1].error, "look for code that depends on the rank.");
  EXPECT_LT(Clock::now() - start, seconds(3));
}

TEST_P(GuardTest, RanksOfAGroupAreNamedByTheirRankInTheJob) {
  const auto all = fates(GetParam(), 4, kLong, [](Communicator& comm) {
    const auto group = comm.split(comm.rank() / 2, 0);
    if (comm.rank() >= 2) sum(*group, 1, comm.rank() == 2 ? "here" : "there");
  });
  EXPECT_SAYS(all[2].error, "rank 2 is in here");
  EXPECT_SAYS(all[2].error, "rank 3 is in there");
}

TEST_P(GuardTest, ATransferInFlightIsFinishedBeforeARankLeaves) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    std::vector<float> full(8'000'000, static_cast<float>(comm.rank()));
    const Work work = comm.all_gather({full.data(), 8'000'000, DType::kF32, {}}, "weights");
    work.wait();
    comm.leave(Departure::kEnded, "ended its script", kLong);
    EXPECT_EQ(full.front(), 0.0f);
    EXPECT_EQ(full.back(), 1.0f);
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.error, "");
    EXPECT_EQ(fate.failure, "");
  }
}

TEST_P(GuardTest, AForkedChildIsNoRank) {
  const auto world = test::make_world(GetParam(), 1, {kLong});
  world[0]->barrier("parent").wait();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(10);
    int code = 1;
    try {
      world[0]->barrier("child").wait();
    } catch (const Error& error) {
      code = std::string(error.what()).find("forked child process") == std::string::npos ? 2 : 0;
    }
    world[0]->leave(Departure::kFailed, "the child must not speak for the parent", kLong);
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  world[0]->barrier("parent").wait();
}

// --- For who moves data beside the communicator

TEST_P(GuardTest, MeetingsAreComparedInTheOrderOfAllCallsAndMoveNothing) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    std::array<std::int64_t, 500> values{};  // more than travels with a header
    values[0] = comm.rank();
    const BufferView view{values.data(), std::ssize(values), DType::kI64, {}};
    const Work first = comm.meet({.op = Op::kAllReduce, .in = view, .out = view, .label = "bucket 7"});
    comm.barrier("between").wait();
    EXPECT_TRUE(first.done());
    EXPECT_EQ(values[0], comm.rank());
    EXPECT_EQ(comm.counters()[static_cast<std::size_t>(Op::kAllReduce)].calls, 0);
    const char* label = comm.rank() == 0 ? "bucket 8" : "bucket 9";
    comm.meet({.op = Op::kAllReduce, .in = view, .out = view, .label = label}).wait();
  });
  for (const Fate& fate : all) {
    EXPECT_SAYS(fate.error, "rank 0 is in bucket 8 [all_reduce (sum) of 500 int64, call 3]");
    EXPECT_SAYS(fate.error, "rank 1 is in bucket 9 [all_reduce (sum) of 500 int64, call 3]");
  }
}

TEST_P(GuardTest, AMeetingIsNotTheCollectiveItself) {
  const auto all = fates(GetParam(), 2, kLong, [](Communicator& comm) {
    std::int64_t value = 1;
    const BufferView view{&value, 1, DType::kI64, {}};
    if (comm.rank() == 0) {
      comm.meet({.op = Op::kAllReduce, .in = view, .out = view, .label = "same"}).wait();
    } else {
      comm.all_reduce({&value, 1}, ReduceOp::kSum, "same").wait();
    }
  });
  for (const Fate& fate : all) EXPECT_SAYS(fate.error, "ranks are in different collectives");
}

// Also while calls are under way, of this rank and of its peer's, in other communicators.
TEST_P(GuardTest, AFailureFromOutsideEndsTheCallsOfAllRanks) {
  const auto all = fates(GetParam(), 3, kLong, [](Communicator& comm) {
    const auto group = comm.split(0, comm.rank());
    if (comm.rank() == 0) {
      const Work pending = comm.barrier("nobody comes");
      comm.announce_failure("[cuda] a cable was cut");
      EXPECT_THROW(pending.wait(), Error);
      comm.announce_failure("[cuda] something else");
      group->barrier("after").wait();
    } else {
      group->barrier("peers").wait();
    }
  });
  for (const Fate& fate : all) {
    EXPECT_EQ(fate.kind, ErrorKind::kComm);
    EXPECT_SAYS(fate.error, "[cuda] a cable was cut");
    EXPECT_SAYS(fate.failure, "[cuda] a cable was cut");
    EXPECT_LT(fate.took, seconds(5));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, GuardTest, testing::Values("local", "shm"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace zc::comm

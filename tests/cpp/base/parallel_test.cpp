#include "zc/base/parallel.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace zc {
namespace {

int cores() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  return CPU_COUNT(&allowed);
}

class ParallelFor : public testing::Test {
 protected:
  ~ParallelFor() override { set_num_threads(1); }
};

// Every element is in one range, and ranges begin at multiples of the grain. Returns whether that is so.
bool covers(std::int64_t numel, std::int64_t grain) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(numel));
  std::atomic<bool> aligned{true};
  parallel_for(numel, grain, [&](std::int64_t begin, std::int64_t end) {
    if (begin % grain != 0 || end <= begin || end > numel) aligned = false;
    for (std::int64_t i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
  });
  for (const auto& count : seen) {
    if (count != 1) return false;
  }
  return aligned;
}

TEST_F(ParallelFor, RangesMakeUpTheWhole) {
  for (int threads : {1, 2, 3}) {
    set_num_threads(threads);
    for (std::int64_t numel : {0, 1, 9, 10, 11, 1000, 1001}) EXPECT_TRUE(covers(numel, 10)) << numel;
  }
}

TEST_F(ParallelFor, NeverMoreThreadsThanCores) {
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(1000);
  EXPECT_EQ(num_threads(), cores());
  set_num_threads(0);
  EXPECT_EQ(num_threads(), 1);
}

TEST_F(ParallelFor, SeveralThreadsTakePart) {
  ASSERT_GE(cores(), 2) << "this takes a machine of two cores";
  set_num_threads(2);
  // Neither range ends before both have begun: one thread alone would never get there.
  std::atomic<int> begun{0};
  parallel_for(2, 1, [&](std::int64_t, std::int64_t) {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(begun, 2);
}

TEST_F(ParallelFor, ThreadsHaveTheDefaultFloatEnvironment) {
  std::fesetround(FE_UPWARD);  // new threads inherit it
  set_num_threads(2);
  std::mutex mutex;
  std::set<std::pair<bool, int>> roundings;  // (the caller's thread, its rounding)
  const auto caller = std::this_thread::get_id();
  for (int k = 0; k < 100; ++k) {
    parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
      const std::lock_guard lock(mutex);
      roundings.insert({std::this_thread::get_id() == caller, std::fegetround()});
    });
  }
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(roundings.count({false, FE_UPWARD}), 0u);
}

TEST_F(ParallelFor, LoopsOfSeveralThreadsAndInsideOfOthersGoOn) {
  set_num_threads(2);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int k = 0; k < 200; ++k) {
        if (!covers(100, 10)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  parallel_for(4, 1, [&](std::int64_t, std::int64_t) {
    if (!covers(100, 10)) ++wrong;
  });
  EXPECT_EQ(wrong, 0);
}

TEST_F(ParallelFor, TheNumberOfThreadsMayChangeBetweenLoops) {
  for (int k = 0; k < 50; ++k) {
    set_num_threads(1 + k % 3);
    EXPECT_TRUE(covers(1000, 10));
  }
}

TEST_F(ParallelFor, AForkedChildRunsAlone) {
  set_num_threads(2);
  EXPECT_TRUE(covers(1000, 10));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const bool good = covers(1000, 10);
    set_num_threads(1);
    const int code = good && covers(1000, 10) ? 0 : 1;
#if defined(__SANITIZE_ADDRESS__)
    _exit(code);  // the search for leaks at the end waits for a lock that a thread of the parent may hold
#else
    std::exit(code);  // with the destructors of what is static
#endif
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(covers(1000, 10));
}

}  // namespace
}  // namespace zc

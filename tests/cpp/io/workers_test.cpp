#include "zc/io/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace zc::io {
namespace {

TEST(WorkersTest, RunsEveryTaskOnceOnThreadsOfTheirOwn) {
  for (int num_workers : {1, 2, 5}) {
    std::vector<std::atomic<int>> runs(100);
    std::vector<std::atomic<int>> inside(static_cast<std::size_t>(num_workers));
    run_workers(100, num_workers, [&](int worker, std::int64_t index) {
      EXPECT_EQ(inside[static_cast<std::size_t>(worker)]++, 0);  // what a worker owns is used by one thread at a time
      runs[static_cast<std::size_t>(index)]++;
      inside[static_cast<std::size_t>(worker)]--;
    });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
  }
  run_workers(0, 3, [](int, std::int64_t) { FAIL(); });
}

TEST(WorkersTest, WorksSideBySide) {
  std::atomic<int> arrived{0};
  run_workers(3, 3, [&](int, std::int64_t) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();  // for ever, unless all three run at once
  });
  EXPECT_EQ(arrived, 3);
}

TEST(WorkersTest, BeginsNothingAfterAFailureAndRethrowsIt) {
  std::atomic<int> begun{0};
  const auto run = [&] {
    run_workers(1000, 2, [&](int, std::int64_t index) {
      ++begun;
      if (index == 3) throw std::runtime_error("the fourth");
      if (index > 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  };
  EXPECT_THROW(run(), std::runtime_error);
  EXPECT_LT(begun, 1000);
}

}  // namespace
}  // namespace zc::io

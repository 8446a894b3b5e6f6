#include "zc/comm/watchdog.h"

#include <gtest/gtest.h>

namespace zc::comm {
namespace {

using std::chrono::milliseconds;

TEST(WatchdogTest, EndsTheProcessAndSaysWhy) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const Watchdog watchdog(milliseconds(20), "CommError: ", "[comm] timed out in the start of the job");
        std::this_thread::sleep_for(std::chrono::seconds(20));
      },
      testing::ExitedWithCode(1), "CommError: .comm. timed out in the start of the job\n");
}

TEST(WatchdogTest, EndsTheProcessOnceItSeesSomething) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        int looks = 0;
        const auto look = [&looks] { return ++looks < 2 ? "" : "rank 1 is gone"; };
        const Watchdog watchdog(std::chrono::minutes(10), "CommError: ", "timed out", look);
        std::this_thread::sleep_for(std::chrono::seconds(20));
      },
      testing::ExitedWithCode(1), "CommError: rank 1 is gone\n");
}

TEST(WatchdogTest, ReleasedInTimeDoesNothing) {
  Watchdog watchdog(milliseconds(50), "", "never written");
  watchdog.release();
  watchdog.release();
  {
    const Watchdog other(milliseconds(50), "", "never written");
  }
  std::this_thread::sleep_for(milliseconds(100));
}

}  // namespace
}  // namespace zc::comm

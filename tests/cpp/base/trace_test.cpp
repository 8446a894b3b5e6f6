#include "zc/base/trace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace zc::trace {
namespace {

TEST(Trace, RecordsScopesInTheOrderOfTheirEnds) {
  {
    const Scope before("before");
  }
  ASSERT_TRUE(start(8));
  {
    const Scope outer("outer", "a");
    const Scope inner("inner", "b");
  }
  const Recording recording = stop();
  ASSERT_EQ(recording.events.size(), 2u);
  const Event &inner = recording.events[0], &outer = recording.events[1];
  EXPECT_STREQ(inner.kind, "inner");
  EXPECT_STREQ(inner.label, "b");
  EXPECT_STREQ(outer.kind, "outer");
  EXPECT_LE(outer.begin_ns, inner.begin_ns);
  EXPECT_LE(inner.begin_ns, inner.end_ns);
  EXPECT_LE(inner.end_ns, outer.end_ns);
  EXPECT_EQ(inner.thread, outer.thread);
  EXPECT_FALSE(inner.in_flight);
}

TEST(Trace, OneRecordingAtATime) {
  ASSERT_TRUE(start(1));
  EXPECT_FALSE(start(1));
  stop();
  EXPECT_TRUE(start(1));
  stop();
}

TEST(Trace, LeavesOutWhatBeganBeforeOrEndsAfterIt) {
  auto scope = std::make_unique<Scope>("before");
  ASSERT_TRUE(start(8));
  scope = std::make_unique<Scope>("across");
  EXPECT_TRUE(stop().events.empty());
  ASSERT_TRUE(start(8));
  scope = std::make_unique<Scope>("after");  // ends "across", begun in the first recording
  EXPECT_TRUE(stop().events.empty());
}

TEST(Trace, CutsLongLabels) {
  ASSERT_TRUE(start(1));
  const std::string label(2 * kLabelBytes, 'x');
  {
    const Scope scope("long", label);
  }
  EXPECT_EQ(stop().events.at(0).label, label.substr(0, kLabelBytes - 1));
}

TEST(Trace, ACollectiveIsInFlightUntilItsMemoryIsDropped) {
  const auto memory = std::make_shared<int>(1);
  EXPECT_EQ(until_dropped("reduce", "off", memory), memory);
  ASSERT_TRUE(start(8));
  auto kept = until_dropped("reduce", "bucket 0", memory);
  EXPECT_EQ(memory.use_count(), 2);
  std::thread([&] { kept.reset(); }).join();
  EXPECT_EQ(memory.use_count(), 1);
  const Recording recording = stop();
  ASSERT_EQ(recording.events.size(), 1u);
  EXPECT_TRUE(recording.events[0].in_flight);
  EXPECT_STREQ(recording.events[0].label, "bucket 0");
}

TEST(Trace, StopWaitsForWhatIsInFlightWithinItsPatience) {
  using std::chrono::milliseconds;
  ASSERT_TRUE(start(8));
  auto lands = until_dropped("reduce", "lands", nullptr);
  std::thread lander([&] {
    std::this_thread::sleep_for(milliseconds(20));
    lands.reset();
  });
  EXPECT_EQ(stop(std::chrono::minutes(1)).events.size(), 1u);
  lander.join();
  ASSERT_TRUE(start(8));
  auto never = until_dropped("reduce", "never", nullptr);
  EXPECT_TRUE(stop(milliseconds(1)).events.empty());
}

TEST(Trace, ThreadsRecordAtOnceAndWhatHasNoRoomIsCounted) {
  constexpr int kThreads = 4, kScopes = 1000, kRoom = 1500;
  ASSERT_TRUE(start(kRoom));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < kScopes; ++i) const Scope scope("work");
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Recording recording = stop();
  EXPECT_EQ(recording.events.size(), static_cast<std::size_t>(kRoom));
  EXPECT_EQ(recording.dropped, kThreads * kScopes - kRoom);
}

}  // namespace
}  // namespace zc::trace

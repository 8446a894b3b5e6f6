// How a thread waits for something that no system call can wait for.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace zc::comm {

// Spins for a few microseconds, yields for a while, then sleeps: ranks and compute threads share cores, and a thread
// that spins takes its time slice from the peer it waits for.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  void reset(Clock::time_point now) {
    since_ = now;
    sleep_ = kShortestSleep;
  }

  // Returns how long the caller is to sleep. Zero: this has spun or, for `yield_time` from reset() on, yielded instead.
  std::chrono::microseconds pause(Clock::time_point now, std::chrono::microseconds yield_time) {
    const auto waited = now - since_;
    if (waited < kSpinTime) return {};
    if (waited < yield_time) {
      sched_yield();
      return {};
    }
    return std::exchange(sleep_, std::min(sleep_ * 2, kLongestSleep));
  }

 private:
  static constexpr std::chrono::microseconds kSpinTime{3};
  static constexpr std::chrono::microseconds kShortestSleep{20};
  static constexpr std::chrono::microseconds kLongestSleep{200};

  std::chrono::microseconds sleep_ = kShortestSleep;
  Clock::time_point since_ = Clock::now();
};

}  // namespace zc::comm

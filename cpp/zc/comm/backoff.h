// How a thread waits for something that no system call can wait for.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace zc::comm {

// Spins for a few microseconds, yields for a while, then sleeps: ranks and compute threads share cores, and a thread
// that spins takes its time slice from the peer it waits for.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(std::chrono::microseconds yield_time) : yield_time_(yield_time) {}

  void reset(Clock::time_point now) {
    since_ = now;
    sleep_ = kShortestSleep;
  }

  void pause(Clock::time_point now) {
    const auto waited = now - since_;
    if (waited < kSpinTime) return;
    if (waited < yield_time_) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, kLongestSleep);
  }

 private:
  static constexpr std::chrono::microseconds kSpinTime{3};
  static constexpr std::chrono::microseconds kShortestSleep{20};
  static constexpr std::chrono::microseconds kLongestSleep{200};

  std::chrono::microseconds yield_time_;
  std::chrono::microseconds sleep_ = kShortestSleep;
  Clock::time_point since_ = Clock::now();
};

}  // namespace zc::comm

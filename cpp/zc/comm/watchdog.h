// For calls that can neither be given a timeout nor be interrupted, such as MPI_Init, which waits for all ranks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace zc::comm {

// Unless released or destroyed within `timeout`, writes `message` to standard error, after `prefix`, and ends the
// process with exit code 1. So it does when `look`, which is called every second, returns a text: with that one.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout, std::string prefix, std::string message,
           std::function<std::string()> look = {});
  ~Watchdog() { release(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void release();

 private:
  void run(std::chrono::milliseconds timeout, const std::function<std::string()>& look);

  std::string prefix_;
  std::string message_;
  std::mutex mutex_;
  std::condition_variable released_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace zc::comm

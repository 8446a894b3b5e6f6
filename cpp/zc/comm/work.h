// A collective in flight.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "zc/base/error.h"
#include "zc/device/device.h"

namespace zc::comm {

class Driver;

// A value handle; copies share the state. The buffers named in the collective must stay alive and untouched until
// wait() has returned or thrown.
class Work {
 public:
  Work() = default;  // already complete

  // Blocks until the collective is done; throws what made it fail. The communicator bounds the time: a collective
  // that peers do not join fails with a CommError after the communicator's timeout.
  void wait() const;

  // What is put on `stream` from now on sees the result. Of memory of a device that runs behind, only the stream waits;
  // the host learns of a failure later, from wait() or from the next collective. Else as wait().
  void wait(device::Stream stream) const;

  // Waits at most `limit`; false when the collective is still in flight. Lets a caller look at signals in between.
  bool wait_for(std::chrono::milliseconds limit) const;

  bool done() const;

  // Whether wait(stream) cannot close a circle of ranks that wait for each other, where their streams also wait for the
  // collectives of another group: it is done; or all ranks have called it, and none has called more of those before it
  // than this rank has until now, which is `turn` (what reduce_scatter_add is told). Waits for that, at most `limit`.
  bool may_wait(std::int64_t turn, std::chrono::milliseconds limit) const;

  // Keeps `memory` alive until the collective is done, for a caller that cannot wait itself.
  void keep(std::shared_ptr<void> memory) const;

  // Adds the time from `begin` to the end of the collective to `total`, in nanoseconds, once it is done.
  void time_into(std::shared_ptr<std::atomic<std::int64_t>> total, std::chrono::steady_clock::time_point begin) const;

  struct Timer {
    std::shared_ptr<std::atomic<std::int64_t>> total{};  // null: nobody wants to know
    std::chrono::steady_clock::time_point begin{};
    void stop() const;
  };
  struct State {
    std::weak_ptr<Driver> driver{};          // which waiting threads help; empty: none that they could
    std::shared_ptr<device::Event> event{};  // the end on a device that runs behind; null: the host waits
    std::shared_ptr<State> meeting{};        // with event: of the ranks, for this collective
    std::int64_t turn = 0;                   // of a meeting, once it is done: the latest rank's
    std::mutex mutex{};
    std::condition_variable finished{};
    std::atomic<bool> done{false};
    std::optional<Error> error{};
    std::shared_ptr<void> kept{};
    Timer timer{};
    void complete(std::optional<Error> failure = std::nullopt);
  };
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::shared_ptr<State>& state() const { return state_; }  // null: complete

 private:
  std::shared_ptr<State> state_;
};

// Makes collectives go on.
class Driver {
 public:
  virtual ~Driver() = default;

  // On the calling thread, unless another is at it, until `state` is done or the time has come; at least once.
  virtual void drive(Work::State& state, std::chrono::steady_clock::time_point deadline) = 0;
};

}  // namespace zc::comm

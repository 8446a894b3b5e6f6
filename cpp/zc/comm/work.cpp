#include "zc/comm/work.h"

#include <algorithm>
#include <utility>

namespace zc::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A driver is held no longer at a time, so that its owner can end it.
constexpr std::chrono::milliseconds kDriveTime{50};

// Each waiter gets an exception of its own: threads must not share one.
void raise(const std::optional<Error>& error) {
  if (error) throw Error(error->kind(), error->what(), error->errno_value());
}

// False: it is not done at `deadline`.
bool wait_until(Work::State& state, Clock::time_point deadline) {
  while (!state.done) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (const auto driver = state.driver.lock()) {
      driver->drive(state, std::min(deadline, now + kDriveTime));
    } else {
      std::unique_lock lock(state.mutex);
      const auto done = [&state] { return state.done.load(); };
      if (deadline == Clock::time_point::max()) {
        state.finished.wait(lock, done);
      } else {
        state.finished.wait_until(lock, deadline, done);
      }
    }
  }
  raise(state.error);
  return true;
}

}  // namespace

void Work::State::complete(std::optional<Error> failure) {
  std::shared_ptr<void> released;  // destroyed outside the lock
  {
    std::lock_guard lock(mutex);
    timer.stop();
    error = std::move(failure);
    released = std::move(kept);
    done = true;
  }
  finished.notify_all();  // not under the lock, which the woken thread takes first of all
}

void Work::Timer::stop() const {
  if (!total) return;
  *total += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

void Work::time_into(std::shared_ptr<std::atomic<std::int64_t>> total, Clock::time_point begin) const {
  Timer timer{std::move(total), begin};
  if (!state_) return timer.stop();
  std::lock_guard lock(state_->mutex);
  if (state_->done) return timer.stop();
  state_->timer = std::move(timer);
}

void Work::wait() const {
  if (state_) wait_until(*state_, Clock::time_point::max());
}

void Work::wait(device::Stream stream) const {
  if (!state_) return;
  if (state_->event == nullptr || state_->done) return wait();
  state_->event->order(stream);
}

bool Work::wait_for(std::chrono::milliseconds limit) const {
  return !state_ || wait_until(*state_, Clock::now() + limit);
}

bool Work::done() const {
  if (!state_ || state_->done) return true;
  if (const auto driver = state_->driver.lock()) driver->drive(*state_, Clock::time_point::min());
  return state_->done;
}

bool Work::may_wait(std::int64_t turn, std::chrono::milliseconds limit) const {
  if (!state_ || state_->done) return true;
  const Work awaited(state_->event != nullptr ? state_->meeting : state_);
  if (!awaited.done() && !awaited.wait_for(limit)) return false;
  return state_->event == nullptr || !state_->meeting || state_->meeting->turn <= turn;
}

void Work::keep(std::shared_ptr<void> memory) const {
  if (!state_) return;
  std::lock_guard lock(state_->mutex);
  if (!state_->done) state_->kept = std::move(memory);
}

}  // namespace zc::comm

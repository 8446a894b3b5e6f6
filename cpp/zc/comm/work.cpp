#include "zc/comm/work.h"

#include <utility>

namespace zc::comm {

namespace {

// Each waiter gets an exception of its own: threads must not share one.
void raise(const std::optional<Error>& error) {
  if (error) throw Error(error->kind(), error->what(), error->errno_value());
}

}  // namespace

void Work::State::complete(std::optional<Error> failure) {
  std::shared_ptr<void> released;  // destroyed outside the lock
  {
    std::lock_guard lock(mutex);
    done = true;
    error = std::move(failure);
    released = std::move(kept);
  }
  finished.notify_all();  // not under the lock, which the woken thread takes first of all
}

void Work::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->finished.wait(lock, [this] { return state_->done; });
  raise(state_->error);
}

bool Work::wait_for(std::chrono::milliseconds limit) const {
  if (!state_) return true;
  std::unique_lock lock(state_->mutex);
  if (!state_->finished.wait_for(lock, limit, [this] { return state_->done; })) return false;
  raise(state_->error);
  return true;
}

bool Work::done() const {
  if (!state_) return true;
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Work::keep(std::shared_ptr<void> memory) const {
  if (!state_) return;
  std::lock_guard lock(state_->mutex);
  if (!state_->done) state_->kept = std::move(memory);
}

}  // namespace zc::comm

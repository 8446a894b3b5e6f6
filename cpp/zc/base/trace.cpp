#include "zc/base/trace.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

namespace zc::trace {
namespace {

std::mutex mutex;
Recording recording;
std::size_t capacity = 0;
std::int64_t started_ns = 0;
std::int64_t num_in_flight = 0;
std::condition_variable landed;

}  // namespace

namespace internal {

std::atomic<bool> enabled{false};

std::int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

void record(std::int64_t begin_ns, const char* kind, std::string_view label, bool in_flight) {
  static thread_local const std::int32_t thread = gettid();
  const std::int64_t end_ns = now_ns();
  const std::lock_guard lock(mutex);
  if (!is_on() || begin_ns < started_ns) return;  // stopped meanwhile; or begun in an earlier recording
  if (recording.events.size() == capacity) {
    ++recording.dropped;
    return;
  }
  Event& event = recording.events.emplace_back(Event{begin_ns, end_ns, thread, in_flight, kind, {}});
  label.copy(event.label, kLabelBytes - 1);
}

}  // namespace internal

bool start(std::size_t events) {
  const std::lock_guard lock(mutex);
  if (is_on()) return false;
  recording = {};
  recording.events.reserve(events);
  capacity = events;
  started_ns = internal::now_ns();
  internal::enabled.store(true, std::memory_order_relaxed);
  return true;
}

Recording stop(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex);
  landed.wait_for(lock, patience, [] { return num_in_flight == 0; });
  internal::enabled.store(false, std::memory_order_relaxed);
  return std::exchange(recording, {});
}

std::shared_ptr<void> until_dropped(const char* kind, std::string_view label, std::shared_ptr<void> kept) {
  if (!is_on()) return kept;
  struct Flight {
    Flight(const char* what, std::string_view which, std::shared_ptr<void> held)
        : kind(what), label(which), kept(std::move(held)) {
      const std::lock_guard lock(mutex);
      ++num_in_flight;
    }
    ~Flight() {
      internal::record(begin_ns, kind, label, true);
      const std::lock_guard lock(mutex);
      --num_in_flight;
      landed.notify_all();
    }
    const char* kind;
    std::string label;
    std::shared_ptr<void> kept;
    std::int64_t begin_ns = internal::now_ns();
  };
  return std::make_shared<Flight>(kind, label, std::move(kept));
}

}  // namespace zc::trace

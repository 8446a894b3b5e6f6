// Records what threads do, and which collectives are in flight, between start() and stop(): the events of a profile.
//
// Where nothing is recorded a scope costs one relaxed load. Where something is, an event goes into memory that start()
// has allocated; nothing is formatted, and what does not fit is counted and dropped.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace zc::trace {

inline constexpr std::size_t kLabelBytes = 104;

struct Event {
  std::int64_t begin_ns = 0;  // of std::chrono::steady_clock
  std::int64_t end_ns = 0;
  std::int32_t thread = 0;       // the kernel's number of it
  bool in_flight = false;        // not what the thread did, but what it has set going
  const char* kind = "";         // a literal: "copy", "wait", ...
  char label[kLabelBytes] = {};  // which bucket, unit, ...; cut where it is longer
};

struct Recording {
  std::vector<Event> events;  // in the order in which they ended
  std::int64_t dropped = 0;
};

// One recording at a time in a process: false when there is one already. From any thread.
bool start(std::size_t capacity);

// Waits for what is in flight, but no longer than `patience`; it is left out then.
Recording stop(std::chrono::milliseconds patience = std::chrono::seconds(1));

namespace internal {
extern std::atomic<bool> enabled;
std::int64_t now_ns();
void record(std::int64_t begin_ns, const char* kind, std::string_view label, bool in_flight);
}  // namespace internal

inline bool is_on() { return internal::enabled.load(std::memory_order_relaxed); }

// What this thread does while the scope is open. Scopes nest. kind, label: must outlive it.
class Scope {
 public:
  explicit Scope(const char* kind, std::string_view label = {})
      : kind_(kind), label_(label), begin_ns_(is_on() ? internal::now_ns() : 0) {}
  ~Scope() {
    if (begin_ns_ != 0) internal::record(begin_ns_, kind_, label_, false);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const char* kind_;
  std::string_view label_;
  std::int64_t begin_ns_;
};

// What a collective in flight is to hold (comm::Work::keep): `kept`, and with it an event from now until it is dropped,
// which is when the collective is done.
std::shared_ptr<void> until_dropped(const char* kind, std::string_view label, std::shared_ptr<void> kept = nullptr);

// Waits, and says so. work: anything with wait().
template <class Work>
void wait(const Work& work, std::string_view label) {
  const Scope scope("wait", label);
  work.wait();
}
template <class Work, class Stream>
void wait(const Work& work, std::string_view label, Stream stream) {
  const Scope scope("wait", label);
  work.wait(stream);
}

}  // namespace zc::trace

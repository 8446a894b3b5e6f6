// A queue of bytes from one rank to another in memory that both map: one writer, one reader.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zc::comm {

class ShmRing {
 public:
  static constexpr std::uint64_t kBytes = std::uint64_t{128} << 10;

  // --- The writer. What is put is seen by the reader after publish().
  std::uint64_t room() const { return kBytes - (written_ - read_.load()); }
  void put(const void* data, std::size_t bytes) {
    const std::size_t at = written_ % kBytes, first = std::min<std::size_t>(bytes, kBytes - at);
    if (first > 0) std::memcpy(data_ + at, data, first);
    if (bytes > first) std::memcpy(data_, static_cast<const std::byte*>(data) + first, bytes - first);
    written_ += bytes;
  }
  void publish() { published_.store(written_, std::memory_order_release); }
  // Asks for a ring at the writer's door when the reader has made room. Look for room again afterwards.
  void want_room() { wants_room_.store(1); }

  // --- The reader. What is got makes room for the writer after release().
  bool empty() const { return published_.load(std::memory_order_acquire) == got_; }
  void get(void* data, std::size_t bytes) {
    const std::size_t at = got_ % kBytes, first = std::min<std::size_t>(bytes, kBytes - at);
    if (first > 0) std::memcpy(data, data_ + at, first);
    if (bytes > first) std::memcpy(static_cast<std::byte*>(data) + first, data_, bytes - first);
    got_ += bytes;
  }
  void skip(std::size_t bytes) { got_ += bytes; }
  // True: the writer wants to know.
  bool release() {
    read_.store(got_);
    return wants_room_.load() != 0 && wants_room_.exchange(0) != 0;
  }

 private:
  // Each side's own line, so that looking costs nothing while nothing happens.
  alignas(64) std::atomic<std::uint64_t> published_{0};
  std::uint64_t written_ = 0;
  alignas(64) std::atomic<std::uint64_t> read_{0};
  std::uint64_t got_ = 0;
  alignas(64) std::atomic<std::uint32_t> wants_room_{0};
  alignas(64) std::byte data_[kBytes];
};

}  // namespace zc::comm

// Host memory that is written one piece after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zc::ckpt {

// Not owned; must stay alive and unchanged during the call that it is given to.
struct Segment {
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

// The concatenation of segments, of which any part can be copied.
class Concatenation {
 public:
  // Keeps `segments`, not a copy of them. Throws kInternal when a size is negative.
  explicit Concatenation(std::span<const Segment> segments);

  std::int64_t bytes() const { return begins_.back(); }
  void copy(std::int64_t begin, std::int64_t bytes, std::byte* to) const;

 private:
  std::span<const Segment> segments_;
  std::vector<std::int64_t> begins_;  // where each segment begins, then where the last one ends
};

// Copies the concatenation to `to`, at memory speed: what an asynchronous save makes the training wait for.
// num_threads 0: one a core.
void copy_segments(std::span<const Segment> segments, std::byte* to, int num_threads);

}  // namespace zc::ckpt

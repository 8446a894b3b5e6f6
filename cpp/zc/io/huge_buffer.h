// A host buffer for bulk data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zc/base/memory.h"

namespace zc::io {

// `bytes` zeroed bytes that begin on a page (on a huge page from 2 MiB on) and are mapped at once, by several threads:
// the first use pays no page faults. Direct I/O from pages of 4 KiB has a quarter of the speed. Movable.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Throws kDevice when there is no memory left.
  explicit HugeBuffer(std::int64_t bytes);

  std::byte* data() const { return memory_.get(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  Memory memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace zc::io

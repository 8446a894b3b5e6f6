// Owning host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace zc {

// Freed with the last copy of the pointer.
using Memory = std::shared_ptr<std::byte[]>;

// Zeroed, aligned to 64 bytes; from 2 MiB on to huge pages. Throws kDevice when the system has no memory left.
Memory allocate_host(std::int64_t bytes);

}  // namespace zc

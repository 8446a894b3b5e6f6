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

// Zeroed, aligned to 4096 bytes; from 2 MiB on to huge pages. The system gives pages when they are first touched, so
// memory may run out then. Throws kDevice when not even the addresses are left.
Memory allocate_pages(std::int64_t bytes);

// Addresses without memory: whoever reads or writes there is killed. Throws kDevice when none are left.
Memory reserve_addresses(std::int64_t bytes);

// Between begin and end the C library takes large allocations (of any library in the process) straight from the system
// and gives them back when they are freed. While a model is built, tensors of many sizes come and go between small
// objects that stay; in the C library's heap they would leave holes as large as the model. In training the heap is
// better: it does not pay for fresh pages at each allocation. Calls nest; from any thread. Not glibc: does nothing.
void begin_direct_allocations();
void end_direct_allocations();

}  // namespace zc

#include "zc/base/memory.h"

#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "zc/base/error.h"

namespace zc {
namespace {

constexpr std::size_t kPage = std::size_t{4} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// `size` bytes, a multiple of kPage, that begin at a multiple of kHugePage; null when there is no memory left. (The C
// library's aligned_alloc would keep up to kHugePage more of the address space.)
std::byte* map_huge(std::size_t size) {
  const std::size_t mapped = size + kHugePage - kPage;
  void* begin = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(begin);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(first) % kHugePage) % kHugePage;
  if (before > 0) munmap(first, before);
  if (mapped - before > size) munmap(first + before + size, mapped - before - size);
#if defined(MADV_HUGEPAGE)
  madvise(first + before, size, MADV_HUGEPAGE);  // a hint: refusal changes speed only
#endif
  return first + before;
}

[[noreturn]] void fail_no_memory(std::int64_t bytes) {
  fail(ErrorKind::kDevice, "[base] out of host memory: got no ", bytes,
       " bytes. Use more ranks, a higher ZeRO stage or a smaller model.");
}

}  // namespace

Memory allocate_pages(std::int64_t bytes) {
  ZC_CHECK(bytes >= 0, kInternal, "[base] allocation of ", bytes, " bytes");
  const std::size_t size = std::max<std::size_t>((static_cast<std::size_t>(bytes) + kPage - 1) / kPage, 1) * kPage;
  std::byte* data = map_huge(size);
  if (data == nullptr) fail_no_memory(bytes);
  return Memory(data, [size](std::byte* p) { munmap(p, size); });
}

Memory allocate_host(std::int64_t bytes) {
  ZC_CHECK(bytes >= 0, kInternal, "[base] allocation of ", bytes, " bytes");
  const auto wanted = static_cast<std::size_t>(bytes);
  if (wanted >= kHugePage) {
    Memory memory = allocate_pages(bytes);
    std::memset(memory.get(), 0, wanted);  // now, not in the first step
    return memory;
  }
  constexpr std::size_t kAlignment = 64;
  const std::size_t size = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, size == 0 ? kAlignment : size);
  if (data == nullptr) fail_no_memory(bytes);
  std::memset(data, 0, size);
  return Memory(static_cast<std::byte*>(data), [](std::byte* p) { std::free(p); });
}

Memory reserve_addresses(std::int64_t bytes) {
  ZC_CHECK(bytes >= 0, kInternal, "[base] addresses of ", bytes, " bytes");
  const auto size = std::max(static_cast<std::size_t>(bytes), kPage);
  void* data = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    fail(ErrorKind::kDevice, "[base] out of addresses: got none for ", bytes, " bytes. Raise the limit (ulimit -v).");
  }
  return Memory(static_cast<std::byte*>(data), [size](std::byte* p) { munmap(p, size); });
}

#if defined(__GLIBC__)
namespace {

std::mutex direct_mutex;
int direct_depth = 0;

// Sets the size from which on malloc asks the system. glibc moves it up to 32 MiB by itself, until it is set by hand.
void set_direct_from(int bytes) {
  mallopt(M_MMAP_THRESHOLD, bytes);
  mallopt(M_TRIM_THRESHOLD, 2 * bytes);
}

}  // namespace

void begin_direct_allocations() {
  const std::lock_guard lock(direct_mutex);
  if (direct_depth++ == 0) set_direct_from(128 << 10);
}

void end_direct_allocations() {
  const std::lock_guard lock(direct_mutex);
  if (--direct_depth == 0) set_direct_from(32 << 20);
}
#else
void begin_direct_allocations() {}
void end_direct_allocations() {}
#endif

}  // namespace zc

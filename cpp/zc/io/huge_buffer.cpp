#include "zc/io/huge_buffer.h"

#include <sys/mman.h>

#include <algorithm>

#include "zc/io/workers.h"

namespace zc::io {
namespace {

constexpr std::int64_t kPage = std::int64_t{4} << 10;
constexpr std::int64_t kPiece = std::int64_t{32} << 20;

void map_pages(std::byte* data, std::int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  if (madvise(data, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) return;  // from Linux 5.14 on
#endif
  for (std::int64_t at = 0; at < bytes; at += kPage) static_cast<volatile std::byte*>(data)[at] = std::byte{0};
}

}  // namespace

HugeBuffer::HugeBuffer(std::int64_t bytes) : memory_(allocate_pages(bytes)), bytes_(bytes) {
  run_workers((bytes + kPiece - 1) / kPiece, num_copy_workers(), [&](int, std::int64_t piece) {
    const std::int64_t begin = piece * kPiece;
    map_pages(data() + begin, std::min(kPiece, bytes - begin));
  });
}

}  // namespace zc::io

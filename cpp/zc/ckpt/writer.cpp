#include "zc/ckpt/writer.h"

#include <unistd.h>

#include <cstring>

#include "zc/io/huge_buffer.h"
#include "zc/io/workers.h"

namespace zc::ckpt {
namespace {

std::vector<std::uint64_t> write_chunks(io::File& file, const Concatenation& source, const Options& options) {
  const std::int64_t bytes = source.bytes();
  const std::int64_t count = num_chunks(bytes, options.chunk_bytes);
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(count));
  std::vector<io::HugeBuffer> buffers(static_cast<std::size_t>(options.num_threads));
  io::run_workers(count, options.num_threads, [&](int worker, std::int64_t chunk) {
    io::HugeBuffer& buffer = buffers[static_cast<std::size_t>(worker)];
    if (buffer.data() == nullptr) buffer = io::HugeBuffer(buffer_bytes(bytes, options.chunk_bytes));
    const std::int64_t size = bytes_of_chunk(chunk, bytes, options.chunk_bytes);
    const std::int64_t padded = io::round_up_to_page(size);
    const std::int64_t offset = chunk * options.chunk_bytes;
    source.copy(offset, size, buffer.data());
    std::memset(buffer.data() + size, 0, static_cast<std::size_t>(padded - size));
    hashes[static_cast<std::size_t>(chunk)] = options.hash(buffer.data(), static_cast<std::size_t>(size));
    file.write(buffer.data(), padded, offset);
  });
  return hashes;
}

}  // namespace

std::vector<std::uint64_t> write_file(const std::string& path, std::span<const Segment> segments,
                                      const Options& options) {
  check(options, ErrorKind::kInternal, path);
  const Concatenation source(segments);
  io::File file = io::File::create(kArea, path);
  try {
    file.use_direct();
    file.reserve(io::round_up_to_page(source.bytes()));
    std::vector<std::uint64_t> hashes = write_chunks(file, source, options);
    if (source.bytes() % io::kPageBytes != 0) file.truncate(source.bytes());
    file.sync();
    file.close();
    return hashes;
  } catch (...) {
    unlink(path.c_str());  // a full disk has room again
    throw;
  }
}

}  // namespace zc::ckpt

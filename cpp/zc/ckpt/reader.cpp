#include "zc/ckpt/reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <vector>

#include "zc/io/huge_buffer.h"
#include "zc/io/workers.h"

namespace zc::ckpt {
namespace {

constexpr const char* kRemedy = " Load another checkpoint, or copy this one again from where it is whole.";

template <class... Parts>
[[noreturn]] void fail_damaged(const std::string& path, const Parts&... parts) {
  fail(ErrorKind::kCheckpoint, "[ckpt] ", path, " is damaged: ", parts..., kRemedy);
}

bool is_missing(int error) { return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENXIO; }

// The file, when it is there and as long as the manifest says.
io::File open_checked(const std::string& path, std::int64_t file_bytes, std::span<const std::uint64_t> hashes,
                      const Options& options) {
  check(options, ErrorKind::kCheckpoint, path);
  try {
    io::File file = io::File::open(kArea, path);
    if (!file.is_regular()) fail_damaged(path, "got a folder or a special file, expected a regular file.");
    if (file.bytes() != file_bytes) {
      fail_damaged(path, "got a file of ", io::with_commas(file.bytes()), " bytes, expected ",
                   io::with_commas(file_bytes), " as the manifest says.");
    }
    const std::int64_t expected = num_chunks(file_bytes, options.chunk_bytes);
    if (static_cast<std::int64_t>(hashes.size()) != expected) {
      fail_damaged(path, "got ", hashes.size(), " checksums in the manifest, expected ", expected, " for ",
                   io::with_commas(file_bytes), " bytes in chunks of ", io::with_commas(options.chunk_bytes), ".");
    }
    file.use_direct();
    return file;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kIo || !is_missing(error.errno_value())) throw;
    const char* what = error.errno_value() == ELOOP ? "a symbolic link" : "nothing";
    fail(ErrorKind::kCheckpoint, "[ckpt] ", path, " is missing: got ", what, ", expected a file of ",
         io::with_commas(file_bytes), " bytes that the manifest names.", kRemedy);
  }
}

// A part of a range that lies in one chunk.
struct Piece {
  std::int64_t chunk;
  std::int64_t offset;  // in the chunk
  std::int64_t bytes;
  std::byte* to;
};

// In the order of their chunks.
std::vector<Piece> cut(const std::string& path, std::int64_t file_bytes, std::span<const Range> ranges,
                       std::int64_t chunk_bytes) {
  std::vector<Piece> pieces;
  for (const Range& range : ranges) {
    if (range.offset < 0 || range.bytes < 0 || range.bytes > file_bytes || range.offset > file_bytes - range.bytes) {
      fail_damaged(path, "the manifest names ", range.bytes, " bytes at ", range.offset, " in a file of ", file_bytes,
                   " bytes.");
    }
    for (std::int64_t done = 0; done < range.bytes;) {
      const std::int64_t at = range.offset + done;
      const std::int64_t bytes = std::min(range.bytes - done, chunk_bytes - at % chunk_bytes);
      pieces.push_back({at / chunk_bytes, at % chunk_bytes, bytes, range.to + done});
      done += bytes;
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.chunk < b.chunk; });
  return pieces;
}

// Reads the chunks chunk(0), ..., chunk(count - 1), each once, and hands each to use(index, data) after its hash was
// found right.
void read_chunks(io::File& file, std::span<const std::uint64_t> hashes, const Options& options, std::int64_t count,
                 const std::function<std::int64_t(std::int64_t)>& chunk_at,
                 const std::function<void(std::int64_t, const std::byte*)>& use) {
  std::vector<io::HugeBuffer> buffers(static_cast<std::size_t>(options.num_threads));
  io::run_workers(count, options.num_threads, [&](int worker, std::int64_t index) {
    io::HugeBuffer& buffer = buffers[static_cast<std::size_t>(worker)];
    if (buffer.data() == nullptr) buffer = io::HugeBuffer(buffer_bytes(file.bytes(), options.chunk_bytes));
    const std::int64_t chunk = chunk_at(index);
    const std::int64_t begin = chunk * options.chunk_bytes;
    const std::int64_t bytes = bytes_of_chunk(chunk, file.bytes(), options.chunk_bytes);
    const std::int64_t got = file.read(buffer.data(), bytes, begin);
    if (got != bytes) {
      fail_damaged(file.path(), "got ", io::with_commas(begin + got), " bytes, expected ",
                   io::with_commas(file.bytes()), ": it was cut while it was read.");
    }
    const std::uint64_t hash = options.hash(buffer.data(), static_cast<std::size_t>(bytes));
    const std::uint64_t expected = hashes[static_cast<std::size_t>(chunk)];
    if (hash != expected) {
      fail_damaged(file.path(), "bytes ", io::with_commas(begin), "..", io::with_commas(begin + bytes),
                   " do not have the checksum that the manifest says: got ", std::hex, hash, ", expected ", expected,
                   std::dec, ".");
    }
    use(index, buffer.data());
  });
}

}  // namespace

void read_ranges(const std::string& path, std::int64_t file_bytes, std::span<const std::uint64_t> hashes,
                 std::span<const Range> ranges, const Options& options) {
  io::File file = open_checked(path, file_bytes, hashes, options);
  const std::vector<Piece> pieces = cut(path, file_bytes, ranges, options.chunk_bytes);
  std::vector<std::size_t> firsts;  // of the pieces of each chunk that is touched, and the end
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i == 0 || pieces[i].chunk != pieces[i - 1].chunk) firsts.push_back(i);
  }
  const auto count = static_cast<std::int64_t>(firsts.size());
  firsts.push_back(pieces.size());
  read_chunks(
      file, hashes, options, count,
      [&](std::int64_t index) { return pieces[firsts[static_cast<std::size_t>(index)]].chunk; },
      [&](std::int64_t index, const std::byte* data) {
        for (std::size_t i = firsts[static_cast<std::size_t>(index)]; i < firsts[static_cast<std::size_t>(index) + 1];
             ++i) {
          std::memcpy(pieces[i].to, data + pieces[i].offset, static_cast<std::size_t>(pieces[i].bytes));
        }
      });
}

void verify_file(const std::string& path, std::int64_t file_bytes, std::span<const std::uint64_t> hashes,
                 const Options& options) {
  io::File file = open_checked(path, file_bytes, hashes, options);
  read_chunks(
      file, hashes, options, static_cast<std::int64_t>(hashes.size()), [](std::int64_t index) { return index; },
      [](std::int64_t, const std::byte*) {});
}

}  // namespace zc::ckpt

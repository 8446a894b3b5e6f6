// Files: whole reads and writes at offsets, past the page cache where the file system can, with errors that say all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zc::io {

// Direct I/O moves whole pages between addresses and offsets that are multiples of this.
constexpr std::int64_t kPageBytes = 4096;

constexpr std::int64_t round_up_to_page(std::int64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// 1234567 as "1,234,567".
std::string with_commas(std::int64_t value);

// Throws kIo with errno's value at the call, the path, and the text "[area] what path: got ...: reason (errno n). What
// to do." `got` may be empty.
[[noreturn]] void fail_errno(std::string_view area, std::string_view what, const std::string& path,
                             const std::string& got = {});

// An open file. Every failure is a zc::Error of kind kIo. read() and write() may be called from several threads at
// once. Only calls of the C library are made, never raw system calls: tests put a failing disk in between.
class File {
 public:
  // A new file, empty; fails with EEXIST when there is something at `path`. `area` stands first in all errors.
  static File create(std::string_view area, std::string path);
  // For reading, or a folder for sync(). Follows no symbolic link at the end of `path` (ELOOP) and never blocks.
  static File open(std::string_view area, std::string path);
  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  bool is_regular() const { return is_regular_; }
  std::int64_t bytes() const { return bytes_; }  // when it was opened

  // From here on past the page cache, where the file system can: the caller keeps to whole pages.
  void use_direct();
  bool is_direct() const { return direct_; }
  // Takes the space for `bytes` on the disk, where the file system can. Then writes on several threads do not wait for
  // each other to extend the file, and a full disk is found before the first byte is written.
  void reserve(std::int64_t bytes);
  void write(const std::byte* data, std::int64_t bytes, std::int64_t offset);
  // Returns how many bytes there were before the end of the file, at most `bytes`. `data` has room for whole pages.
  std::int64_t read(std::byte* data, std::int64_t bytes, std::int64_t offset);
  void truncate(std::int64_t bytes);
  // All that was written, and the length, are on the disk; of a folder, its entries.
  void sync();
  // Reports what only closing reports (network file systems). The destructor closes, too, and keeps silent.
  void close();

 private:
  File(std::string_view area, std::string path, int fd);
  void leave_direct();

  std::string area_;
  std::string path_;
  int fd_;
  bool is_regular_ = true;
  std::int64_t bytes_ = 0;
  std::atomic<bool> direct_{false};
};

}  // namespace zc::io

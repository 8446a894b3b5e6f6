#include "zc/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "zc/base/error.h"

namespace zc::io {
namespace {

const char* remedy(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "Free space, or choose another folder.";
    case EROFS:
    case EACCES:
    case EPERM:
      return "Make the folder writable, or choose another one.";
    case EEXIST:
      return "Remove it, or choose another name.";
    case ENOENT:
    case ENOTDIR:
      return "See that the folder exists and is mounted.";
    case EMFILE:
    case ENFILE:
      return "Raise the limit on open files (ulimit -n).";
    default:
      return "See that the disk is healthy and mounted.";
  }
}

// Repeats a call that a signal interrupts.
template <class Call>
auto uninterrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

std::string of_bytes(std::int64_t got, std::int64_t wanted, std::int64_t offset) {
  return concat("got ", with_commas(got), " of ", with_commas(wanted), " bytes at offset ", with_commas(offset));
}

}  // namespace

std::string with_commas(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

void fail_errno(std::string_view area, std::string_view what, const std::string& path, const std::string& got) {
  const int error = errno;
  throw Error(ErrorKind::kIo,
              concat("[", area, "] ", what, " ", path, ": ", got, got.empty() ? "" : ": ",
                     std::generic_category().message(error), " (errno ", error, "). ", remedy(error)),
              error, path);
}

File::File(std::string_view area, std::string path, int fd) : area_(area), path_(std::move(path)), fd_(fd) {}

File::File(File&& other) noexcept
    : area_(std::move(other.area_)),
      path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      is_regular_(other.is_regular_),
      bytes_(other.bytes_),
      direct_(other.direct_.load()) {}

File File::create(std::string_view area, std::string path) {
  const int fd = uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666); });
  if (fd == -1) fail_errno(area, "create", path);
  return {area, std::move(path), fd};
}

File File::open(std::string_view area, std::string path) {
  // O_NONBLOCK: to open a pipe would wait for a writer.
  const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  const int fd = uninterrupted([&] { return ::open(path.c_str(), flags); });
  if (fd == -1) fail_errno(area, "open", path);
  File file(area, std::move(path), fd);
  struct stat status;
  if (fstat(fd, &status) == -1) fail_errno(area, "look at", file.path_);
  file.is_regular_ = S_ISREG(status.st_mode);
  file.bytes_ = status.st_size;
  return file;
}

File::~File() {
  if (fd_ != -1) ::close(fd_);
}

// Set on the open file, since an open() that refuses O_DIRECT leaves a new file behind.
void File::use_direct() {
  const int flags = fcntl(fd_, F_GETFL);
  direct_ = flags != -1 && fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0;
}

void File::leave_direct() {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
  direct_ = false;
}

void File::reserve(std::int64_t bytes) {
  if (bytes == 0 || uninterrupted([&] { return fallocate(fd_, 0, 0, bytes); }) == 0) return;
  if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return;
  const int error = errno;
  struct statvfs disk;
  const bool known = error == ENOSPC && fstatvfs(fd_, &disk) == 0;
  const std::int64_t free =
      known ? static_cast<std::int64_t>(disk.f_bavail) * static_cast<std::int64_t>(disk.f_frsize) : 0;
  errno = error;
  fail_errno(area_, "write", path_,
             known ? concat("got ", with_commas(free), " bytes of free space, expected ", with_commas(bytes))
                   : of_bytes(0, bytes, 0));
}

void File::write(const std::byte* data, std::int64_t bytes, std::int64_t offset) {
  for (std::int64_t done = 0; done < bytes;) {
    const bool direct = direct_;
    const ssize_t result = pwrite(fd_, data + done, static_cast<std::size_t>(bytes - done), offset + done);
    if (result > 0) {
      done += result;
    } else if (result == -1 && errno == EINTR) {
      continue;
    } else if (result == -1 && errno == EINVAL && direct) {
      leave_direct();  // the file system took the flag and refuses the write, or has written a part of a page
    } else {
      if (result == 0) errno = EIO;
      fail_errno(area_, "write", path_, of_bytes(done, bytes, offset));
    }
  }
}

std::int64_t File::read(std::byte* data, std::int64_t bytes, std::int64_t offset) {
  const std::int64_t room = round_up_to_page(bytes);
  std::int64_t done = 0;
  while (done < bytes) {
    const bool direct = direct_;
    const ssize_t result = pread(fd_, data + done, static_cast<std::size_t>(room - done), offset + done);
    if (result > 0) {
      done += result;
    } else if (result == 0) {
      break;
    } else if (errno == EINTR) {
      continue;
    } else if (errno == EINVAL && direct) {
      leave_direct();  // as in write()
    } else {
      fail_errno(area_, "read", path_, of_bytes(done, bytes, offset));
    }
  }
  return std::min(done, bytes);
}

void File::truncate(std::int64_t bytes) {
  if (uninterrupted([&] { return ftruncate(fd_, bytes); }) == -1) {
    fail_errno(area_, "set the length of", path_, concat("to ", with_commas(bytes), " bytes"));
  }
}

void File::sync() {
  if (uninterrupted([&] { return fsync(fd_); }) == 0) return;
  if (errno == EINVAL && !is_regular_) return;  // a file system that orders its folders itself
  fail_errno(area_, "sync", path_);
}

void File::close() {
  // Not repeated on EINTR: Linux has closed the file by then.
  if (::close(std::exchange(fd_, -1)) == -1 && errno != EINTR) fail_errno(area_, "close", path_);
}

}  // namespace zc::io

// A library for LD_PRELOAD that makes the disk under one folder fail, or the process die, at one exact operation, and
// that journals what a process does there, so that power_cut.py can build what a power cut would leave.
//
// An operation is one call that changes the folder or makes changes last: open that creates or empties, write, pwrite,
// ftruncate, fallocate, fsync, fdatasync, rename, mkdir, unlink, rmdir, and their relatives. Operations of one process
// happen one at a time, in the order of their numbers, which start at 1. Set in the environment:
//
//   ZC_FAULTY_ROOT     the folder, a real path. Nothing is touched without it.
//   ZC_FAULTY_AT       number of the operation at which to act; 0: never
//   ZC_FAULTY_ACTION   kill      SIGKILL in place of the operation
//                      tear      the first half of a write, then SIGKILL; like kill for other operations
//                      short     the write does its first half only and says so; other operations go well
//                      fail      the operation fails with ZC_FAULTY_ERRNO (a number), and is not done
//                      fail_on   it and all later ones do
//   ZC_FAULTY_JOURNAL  a file outside of the folder, to which every operation that was done is appended. Several
//                      processes may share it: an operation is in it before its call returns.
//
// Read when the library is loaded and at each zc_faulty_begin(), which also starts the numbers again.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#define ZC_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The C library's own function of that name.
template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

enum class Action { kNone, kKill, kTear, kShort, kFail, kFailOn };

struct State {
  std::mutex mutex;
  std::string root;
  Action action = Action::kNone;
  long at = 0;
  int error = EIO;
  int journal = -1;
  long count = 0;
};

State& state() {
  static auto* instance = new State;  // never destroyed: other libraries write while the process ends
  return *instance;
}

[[noreturn]] void stop(const char* what) {
  fprintf(stderr, "[faulty_fs] %s\n", what);
  abort();
}

std::string variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

Action to_action(const std::string& name) {
  if (name.empty()) return Action::kNone;
  if (name == "kill") return Action::kKill;
  if (name == "tear") return Action::kTear;
  if (name == "short") return Action::kShort;
  if (name == "fail") return Action::kFail;
  if (name == "fail_on") return Action::kFailOn;
  stop("ZC_FAULTY_ACTION is none of kill, tear, short, fail, fail_on");
}

std::string path_of(int fd) {
  char path[PATH_MAX];
  const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path);
  return size < 0 ? "" : std::string(path, static_cast<std::size_t>(size));
}

// The absolute path of `path`, whose last component need not exist and is not followed.
std::string resolve(int folder_fd, const char* path) {
  std::string name = path;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  if (name[0] != '/') name = (folder_fd == AT_FDCWD ? "." : path_of(folder_fd)) + "/" + name;
  const std::size_t slash = name.find_last_of('/');
  char folder[PATH_MAX];
  if (realpath(slash == 0 ? "/" : name.substr(0, slash).c_str(), folder) == nullptr) return name;
  return std::string(folder) + name.substr(slash);
}

bool is_under_root(const std::string& path) {
  const std::string& root = state().root;
  return !root.empty() && path.starts_with(root) && (path.size() == root.size() || path[root.size()] == '/');
}

std::string relative(const std::string& path) {
  const std::size_t begin = state().root.size() + 1;
  return path.size() < begin ? "" : path.substr(begin);
}

std::string inode(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

// Fields are separated by tabs; `data` follows the line.
void journal(const std::string& line, std::string_view data = {}) {
  if (state().journal == -1) return;
  const std::string head = line + "\n";
  const iovec parts[] = {{const_cast<char*>(head.data()), head.size()}, {const_cast<char*>(data.data()), data.size()}};
  if (::writev(state().journal, parts, 2) != static_cast<ssize_t>(head.size() + data.size())) {
    stop("the journal cannot be written");
  }
}

[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Does one operation: counts it, and acts when it is the one. call(part) does it, a write its first half where `part`
// is true; it journals what it did.
template <class Call>
auto operate(bool is_write, Call call) -> decltype(call(false)) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const long number = ++s.count;
  if (s.at == 0 || s.action == Action::kNone) return call(false);
  if (number == s.at || (number > s.at && s.action == Action::kFailOn)) {
    switch (s.action) {
      case Action::kKill:
        die();
      case Action::kTear:
        if (is_write) call(true);
        die();
      case Action::kShort:
        return call(is_write);
      default:
        errno = s.error;
        return -1;
    }
  }
  return call(false);
}

std::size_t part_of(std::size_t bytes, bool part) {
  if (!part) return bytes;
  return bytes > 8192 ? bytes / 2 / 4096 * 4096 : bytes / 2;  // direct writes stay whole pages
}

template <class Write>
ssize_t write_at(int fd, const void* data, std::size_t bytes, off_t offset, Write write) {
  if (!is_under_root(path_of(fd))) return write(bytes);
  return operate(true, [&](bool part) -> ssize_t {
    const std::size_t wanted = part_of(bytes, part);
    const ssize_t done = wanted == 0 && bytes > 0 ? 0 : write(wanted);
    if (done > 0) {
      const off_t at = offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR) - done;
      journal("write\t" + inode(fd) + "\t" + std::to_string(at) + "\t" + std::to_string(done),
              {static_cast<const char*>(data), static_cast<std::size_t>(done)});
    }
    return done;
  });
}

template <class Open>
int open_at(int folder_fd, const char* path, int flags, Open open) {
  if ((flags & (O_CREAT | O_TRUNC)) == 0 || state().root.empty()) return open();
  const std::string where = resolve(folder_fd, path);
  if (!is_under_root(where)) return open();
  struct stat before;
  const bool exists = lstat(where.c_str(), &before) == 0;
  if (exists && ((flags & O_EXCL) != 0 || (flags & O_TRUNC) == 0)) return open();  // changes nothing
  return operate(false, [&](bool) {
    const int fd = open();
    if (fd != -1) journal(exists ? "size\t" + inode(fd) + "\t0" : "create\t" + inode(fd) + "\t" + relative(where));
    return fd;
  });
}

template <class Call>
int change_file(int fd, const char* name, off_t bytes, Call call) {
  if (!is_under_root(path_of(fd))) return call();
  return operate(false, [&](bool) {
    const int result = call();
    if (result == 0) journal(std::string(name) + "\t" + inode(fd) + "\t" + std::to_string(bytes));
    return result;
  });
}

int sync(int fd, const char* name) {
  const auto call = real<int(int)>(name);
  if (!is_under_root(path_of(fd))) return call(fd);
  return operate(false, [&](bool) {
    journal("sync_begin\t" + inode(fd));  // what comes later, from another process, may have missed it
    const int result = call(fd);
    if (result == 0) journal("sync\t" + inode(fd));
    return result;
  });
}

template <class Call>
int change_entry(const char* name, const std::string& path, Call call) {
  if (!is_under_root(path)) return call();
  return operate(false, [&](bool) {
    const int result = call();
    if (result != 0) return result;
    struct stat status;
    const bool is_there = lstat(path.c_str(), &status) == 0;
    journal(std::string(name) + "\t" + (is_there ? std::to_string(status.st_ino) : "0") + "\t" + relative(path));
    return result;
  });
}

template <class Call>
int rename_at(int from_fd, const char* from, int to_fd, const char* to, const char* name, Call call) {
  if (state().root.empty()) return call();
  const std::string a = resolve(from_fd, from), b = resolve(to_fd, to);
  if (!is_under_root(a) && !is_under_root(b)) return call();
  return operate(false, [&](bool) {
    const int result = call();
    if (result == 0) journal(std::string(name) + "\t" + relative(a) + "\t" + relative(b));
    return result;
  });
}

}  // namespace

ZC_EXPORT void zc_faulty_begin() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.journal != -1) close(s.journal);
  s.root = variable("ZC_FAULTY_ROOT");
  s.action = to_action(variable("ZC_FAULTY_ACTION"));
  s.at = std::atol(variable("ZC_FAULTY_AT").c_str());
  s.error = std::atoi(variable("ZC_FAULTY_ERRNO").c_str());
  s.count = 0;
  const std::string path = variable("ZC_FAULTY_JOURNAL");
  s.journal = path.empty() ? -1
                           : real<int(const char*, int, ...)>("open")(path.c_str(),
                                                                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (!path.empty() && s.journal == -1) stop("ZC_FAULTY_JOURNAL cannot be opened");
}

// How many operations there were since zc_faulty_begin().
ZC_EXPORT long zc_faulty_count() {
  const std::lock_guard lock(state().mutex);
  return state().count;
}

__attribute__((constructor)) static void begin_when_loaded() { zc_faulty_begin(); }

#define ZC_OPEN_MODE                               \
  mode_t mode = 0;                                 \
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {      \
    va_list list;                                  \
    va_start(list, flags);                         \
    mode = static_cast<mode_t>(va_arg(list, int)); \
    va_end(list);                                  \
  }

ZC_EXPORT int open(const char* path, int flags, ...) {
  ZC_OPEN_MODE
  return open_at(AT_FDCWD, path, flags, [&] { return real<int(const char*, int, ...)>("open")(path, flags, mode); });
}

ZC_EXPORT int openat(int folder, const char* path, int flags, ...) {
  ZC_OPEN_MODE
  return open_at(folder, path, flags,
                 [&] { return real<int(int, const char*, int, ...)>("openat")(folder, path, flags, mode); });
}

ZC_EXPORT ssize_t write(int fd, const void* data, size_t bytes) {
  return write_at(fd, data, bytes, -1,
                  [&](size_t n) { return real<ssize_t(int, const void*, size_t)>("write")(fd, data, n); });
}

ZC_EXPORT ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return write_at(fd, data, bytes, offset, [&](size_t n) {
    return real<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, n, offset);
  });
}

ZC_EXPORT int ftruncate(int fd, off_t bytes) noexcept {
  return change_file(fd, "size", bytes, [&] { return real<int(int, off_t)>("ftruncate")(fd, bytes); });
}

ZC_EXPORT int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return change_file(fd, "extend", offset + bytes,
                     [&] { return real<int(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, bytes); });
}

ZC_EXPORT int fsync(int fd) { return sync(fd, "fsync"); }
ZC_EXPORT int fdatasync(int fd) { return sync(fd, "fdatasync"); }

ZC_EXPORT int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  return change_entry("mkdir", resolve(folder, path),
                      [&] { return real<int(int, const char*, mode_t)>("mkdirat")(folder, path, mode); });
}

ZC_EXPORT int unlinkat(int folder, const char* path, int flags) noexcept {
  return change_entry("remove", resolve(folder, path),
                      [&] { return real<int(int, const char*, int)>("unlinkat")(folder, path, flags); });
}

ZC_EXPORT int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) noexcept {
  return rename_at(from_fd, from, to_fd, to, (flags & RENAME_EXCHANGE) != 0 ? "exchange" : "rename", [&] {
    return real<int(int, const char*, int, const char*, unsigned)>("renameat2")(from_fd, from, to_fd, to, flags);
  });
}

// The rest are other names or shorter forms of those above.
ZC_EXPORT int open64(const char* path, int flags, ...) {
  ZC_OPEN_MODE
  return open(path, flags, mode);
}
ZC_EXPORT int openat64(int folder, const char* path, int flags, ...) {
  ZC_OPEN_MODE
  return openat(folder, path, flags, mode);
}
ZC_EXPORT ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return pwrite(fd, data, bytes, offset);
}
ZC_EXPORT int ftruncate64(int fd, off64_t bytes) noexcept { return ftruncate(fd, bytes); }
ZC_EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) {
  return fallocate(fd, mode, offset, bytes);
}
ZC_EXPORT int mkdir(const char* path, mode_t mode) noexcept { return mkdirat(AT_FDCWD, path, mode); }
ZC_EXPORT int unlink(const char* path) noexcept { return unlinkat(AT_FDCWD, path, 0); }
ZC_EXPORT int rmdir(const char* path) noexcept { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
ZC_EXPORT int rename(const char* from, const char* to) noexcept { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
ZC_EXPORT int renameat(int from_fd, const char* from, int to_fd, const char* to) noexcept {
  return renameat2(from_fd, from, to_fd, to, 0);
}

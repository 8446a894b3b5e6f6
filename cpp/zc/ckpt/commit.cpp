#include "zc/ckpt/commit.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "zc/base/error.h"
#include "zc/ckpt/chunks.h"
#include "zc/io/file.h"

namespace zc::ckpt {
namespace {

std::string parent(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

bool is_folder(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) return true;
    errno = ENOTDIR;
  } else if (errno == ENOENT) {
    return false;
  }
  io::fail_errno(kArea, "replace", path);
}

void rename_checked(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) io::fail_errno(kArea, "rename", from, "to " + to);
}

}  // namespace

void write_new_file(const std::string& path, std::string_view data) {
  io::File file = io::File::create(kArea, path);
  try {
    file.write(reinterpret_cast<const std::byte*>(data.data()), static_cast<std::int64_t>(data.size()), 0);
    file.sync();
    file.close();
  } catch (...) {
    unlink(path.c_str());
    throw;
  }
}

void replace_file(const std::string& path, std::string_view data) {
  const std::string beside = path + ".new";
  if (unlink(beside.c_str()) != 0 && errno != ENOENT) io::fail_errno(kArea, "remove", beside);
  write_new_file(beside, data);
  try {
    rename_checked(beside, path);
  } catch (...) {
    unlink(beside.c_str());
    throw;
  }
  sync_folder(parent(path));
}

void sync_folder(const std::string& path) {
  io::File folder = io::File::open(kArea, path + "/.");  // open() follows no link, but a user's folder may be one
  folder.sync();
}

std::string commit_folder(const std::string& from, const std::string& to) {
  ZC_CHECK(parent(from) == parent(to), kInternal, "[ckpt] commit of ", from, " to ", to, ": not in one folder");
  sync_folder(from);
  std::string old;
  if (!is_folder(to)) {
    rename_checked(from, to);
  } else if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    old = from;
  } else if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) {
    old = from + ".replaced";
    rename_checked(to, old);
    rename_checked(from, to);
  } else {
    io::fail_errno(kArea, "exchange", from, "with " + to);
  }
  sync_folder(parent(to));
  return old;
}

}  // namespace zc::ckpt

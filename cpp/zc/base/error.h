// The one error type of the core. Bindings map each kind to a Python exception of zerocore.errors.
//
// Message form: "[area] what happened: got X, expected Y. How to fix it."
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace zc {

enum class ErrorKind { kConfig, kComm, kIo, kCheckpoint, kDevice, kUnsupported, kNonFinite, kInternal };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int errno_value = 0, std::string path = {})
      : std::runtime_error(message), kind_(kind), errno_value_(errno_value), path_(std::move(path)) {}

  ErrorKind kind() const { return kind_; }
  int errno_value() const { return errno_value_; }   // 0 when no system call failed
  const std::string& path() const { return path_; }  // of the file that a call failed on, else empty

 private:
  ErrorKind kind_;
  int errno_value_;
  std::string path_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

}  // namespace zc

// Throws zc::Error of `kind` with the concatenated parts when `condition` is false.
#define ZC_CHECK(condition, kind, ...)                \
  do {                                                \
    if (!(condition)) [[unlikely]]                    \
      ::zc::fail(::zc::ErrorKind::kind, __VA_ARGS__); \
  } while (0)

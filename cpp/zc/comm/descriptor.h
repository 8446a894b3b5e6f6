// File descriptors that the forked children of a rank do not keep.
//
// A child (a data-loader worker) would hold a rank's sockets open after the rank's death, which would so go unnoticed.
// They are closed in every child, by a handler of pthread_atfork; programs started by a rank do not get them either:
// make them close-on-exec.
#pragma once

#include <functional>

namespace zc::comm {

class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  // Of what `make` returns; no fork comes between. Empty where it returns a negative number, with errno as it is.
  static Descriptor adopt(const std::function<int()>& make);

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace zc::comm

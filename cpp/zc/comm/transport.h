// Point-to-point messages between the ranks of a job: all that a backend must bring. Collectives, groups, the guard
// and timeouts are built on top, once, for every backend.
// MpiTransport speaks MPI through a plugin; LocalTransport connects threads of one process.
#pragma once

#include <cstdint>

namespace zc::comm {

class Transport {
 public:
  using Request = void*;  // null: complete

  static constexpr int kMaxTag = 32767;                                    // what every MPI library offers
  static constexpr std::int64_t kMaxMessageBytes = std::int64_t{1} << 30;  // MPI counts are ints: callers cut

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;

  // Messages between two ranks with one tag arrive in the order sent; one may be shorter than the room its receiver
  // gives it. The memory stays the caller's and must live until test() has returned true or cancel() has returned. All
  // calls come from one thread at a time.
  virtual Request send(int peer, const void* data, std::int64_t bytes, int tag) = 0;
  virtual Request receive(int peer, void* data, std::int64_t bytes, int tag) = 0;

  // True: complete, and `request` is null from then on. A null request is complete.
  virtual bool test(Request& request) = 0;

  // Gives the request up; `request` is null afterwards. The memory of a receive is not written any more. False: this
  // was a send whose memory may still be read, until the process ends.
  virtual bool cancel(Request& request) noexcept = 0;
};

}  // namespace zc::comm

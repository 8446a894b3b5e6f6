// Point-to-point messages between the ranks of a job: all that a backend must bring. Collectives, groups, the guard
// and timeouts are built on top, once, for every backend. Backends that have it let peers read memory in place, too.
// MpiTransport speaks MPI through a plugin; ShmTransport connects processes of one node through shared memory;
// LocalTransport connects threads of one process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zc/base/memory.h"
#include "zc/comm/doorbell.h"

namespace zc::comm {

// Where memory of a rank lies, for its peers. Travels as bytes.
struct Place {
  std::uint64_t offset = 0;
  std::uint32_t segment = 0;  // 0: nowhere that a peer could read
};

class Transport {
 public:
  using Request = void*;  // null: complete; a receive is not before test() says so

  static constexpr int kMaxTag = 32767;                                    // what every MPI library offers
  static constexpr std::int64_t kMaxMessageBytes = std::int64_t{1} << 30;  // MPI counts are ints: callers cut

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const char* name() const = 0;

  // Messages between two ranks with one tag arrive in the order sent; one may be shorter than the room its receiver
  // gives it. The memory stays the caller's and must live until test() has returned true or cancel() has returned. All
  // calls come from one thread at a time, unless it says otherwise.
  virtual Request send(int peer, const void* data, std::int64_t bytes, int tag) = 0;
  virtual Request receive(int peer, void* data, std::int64_t bytes, int tag) = 0;

  // True: complete, and `request` is null from then on. A null request is complete.
  virtual bool test(Request& request) = 0;

  // Gives the request up; `request` is null afterwards. The memory of a receive is not written any more. False: this
  // was a send whose memory may still be read, until the process ends.
  virtual bool cancel(Request& request) noexcept = 0;

  // Rung when a request may have been completed; null: nothing tells, so that a thread must look again and again.
  virtual Doorbell* doorbell() { return nullptr; }

  // --- Memory that peers read in place.

  // Zeroed memory, aligned to 64 bytes; null: this backend has no such memory, or not in this size. From any thread.
  virtual Memory allocate(std::int64_t /*bytes*/) { return nullptr; }

  // Where `bytes` from `data` on lie; what has a place can be mapped by every peer from then on.
  virtual Place locate(const void* /*data*/, std::int64_t /*bytes*/) { return {}; }

  // Memory of a peer, for as long as the peer does not free it; null: not known yet, ask again.
  virtual const std::byte* map(int /*peer*/, const Place& /*place*/) { return nullptr; }

  // Zeroed memory that each of `peers` may adopt() once, under *number: it is the same for all of them then, and lives
  // until the last one frees it. Null: this backend has no such memory.
  virtual Memory share(std::int64_t /*bytes*/, std::span<const int> /*peers*/, std::uint32_t* /*number*/) {
    return nullptr;
  }

  // Null: not arrived yet, ask again.
  virtual Memory adopt(int /*peer*/, std::uint32_t /*number*/) { return nullptr; }
};

}  // namespace zc::comm

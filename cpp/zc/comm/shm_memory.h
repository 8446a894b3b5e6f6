// Memory of one rank that its peers on the node read in place.
//
// Each allocation is a memory file without a name (memfd): nothing is left behind when its processes end, however they
// end, and the size of /dev/shm does not matter. Its descriptor goes to the peers over sockets when the memory is first
// named to them, and is closed then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "zc/base/memory.h"
#include "zc/comm/descriptor.h"
#include "zc/comm/transport.h"

namespace zc::comm {

// A memory file of `bytes` zeroed bytes, all of which the system has given; throws kDevice when it has not as much.
Descriptor make_memory_file(std::int64_t bytes);

// One message over a socket that keeps their borders, with a descriptor unless null; neither waits. False: errno says
// why not.
bool send_with(const Descriptor& socket, const void* data, std::size_t bytes, const Descriptor* file);
bool receive_with(const Descriptor& socket, void* data, std::size_t bytes, Descriptor* file);

// A mapping of a whole memory file. Throws kDevice when there are no addresses left.
class Mapping {
 public:
  enum class Access { kRead, kWrite };
  Mapping() = default;
  Mapping(const Descriptor& file, std::int64_t bytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  void hide_from_children() const;  // forked ones have no business with it, and must not keep it

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// All of it from any thread.
class ShmMemory : public std::enable_shared_from_this<ShmMemory> {
 public:
  // sockets: to each rank, connected; empty for this one.
  explicit ShmMemory(std::vector<Descriptor> sockets);

  // The memory may outlive this rank's part in the job.
  Memory allocate(std::int64_t bytes);

  Place locate(const void* data, std::int64_t bytes);
  const std::byte* map(int peer, const Place& place);

  // As Transport::share() and adopt().
  Memory share(std::int64_t bytes, std::span<const int> peers, std::uint32_t* number);
  Memory adopt(int peer, std::uint32_t number);

  // Sends what had to wait for room. Cheap where there is nothing.
  void poll();

  // Peers are not told of anything any more.
  void close();

 private:
  enum class Kind : std::uint32_t { kMemory, kFreed, kShared };
  struct Note {
    Kind kind;
    std::uint32_t segment;
    std::int64_t bytes;
  };
  struct Outgoing {
    Note note;
    std::shared_ptr<Descriptor> file;  // of kMemory and kShared
  };
  struct Segment {
    std::uint32_t number;
    Mapping mapping;
    std::shared_ptr<Descriptor> file;  // null: all peers have been told
  };
  struct Peer {
    Descriptor socket;
    std::deque<Outgoing> outgoing;
    std::unordered_map<std::uint32_t, Mapping> segments;
    std::unordered_map<std::uint32_t, Mapping> offered;  // to be adopted
  };

  void free(const std::byte* data) noexcept;
  void tell_all(const Note& note, const std::shared_ptr<Descriptor>& file);
  void send_to(Peer& peer);
  void send_to_all();
  void hear_from(Peer& peer);
  bool hear_one(Peer& peer);

  const int process_id_;
  std::mutex mutex_;
  std::uint32_t num_segments_ = 0;
  std::map<const std::byte*, Segment> own_;  // by their begin
  std::vector<Peer> peers_;
  std::atomic<bool> waiting_{false};  // some `outgoing` is not empty
};

}  // namespace zc::comm

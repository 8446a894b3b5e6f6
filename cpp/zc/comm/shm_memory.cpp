#include "zc/comm/shm_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "zc/base/error.h"

namespace zc::comm {
namespace {

constexpr const char* kWayOut = ". Use more ranks, a higher ZeRO stage or a smaller model.";

Memory own(Mapping mapping) {
  auto held = std::make_shared<Mapping>(std::move(mapping));
  std::byte* const data = held->data();
  return Memory(std::move(held), data);
}

// What the machine can give: a memory file may grow beyond it, and then processes are killed.
std::int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::int64_t kib = 0;
  while (file >> name) {
    if (name == "MemAvailable:" && file >> kib) return kib * 1024;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return std::numeric_limits<std::int64_t>::max();
}

// Memory keeps its descriptor until peers have it: a large model has more of that than the usual 1024. False: the limit
// is what the system allows already.
bool raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

}  // namespace

Descriptor make_memory_file(std::int64_t bytes) {
  const std::int64_t available = available_bytes();
  ZC_CHECK(bytes <= available, kDevice, "[comm] out of shared memory: got no ", bytes, " bytes, the machine has ",
           available, " left", kWayOut);
  const auto open = [] { return memfd_create("zerocore", MFD_CLOEXEC); };
  Descriptor file = Descriptor::adopt(open);
  if (!file && errno == EMFILE && raise_descriptor_limit()) file = Descriptor::adopt(open);
  int result = 0;
  if (!file || ftruncate(file.get(), bytes) != 0 || (result = posix_fallocate(file.get(), 0, bytes)) != 0) {
    const int reason = result != 0 ? result : errno;
    throw Error(ErrorKind::kDevice,
                concat("[comm] out of shared memory: got no ", bytes, " bytes: ", std::strerror(reason), kWayOut),
                reason);
  }
  return file;
}

// --- Messages with descriptors

bool send_with(const Descriptor& socket, const void* data, std::size_t bytes, const Descriptor* file) {
  iovec vector{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (file != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = file->get();
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
}

bool receive_with(const Descriptor& socket, void* data, std::size_t bytes, Descriptor* file) {
  iovec vector{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  *file = Descriptor::adopt([&] {
    got = recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const cmsghdr* const header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    int fd = -1;
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
  });
  return got == static_cast<ssize_t>(bytes);
}

// --- Mapping

Mapping::Mapping(const Descriptor& file, std::int64_t bytes, Access access) : bytes_(bytes) {
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  // The owner's pages are there: its first pass shall not have to look each of them up.
  const int flags = access == Access::kRead ? MAP_SHARED : MAP_SHARED | MAP_POPULATE;
  void* begin = mmap(nullptr, static_cast<std::size_t>(bytes), protection, flags, file.get(), 0);
  if (begin == MAP_FAILED) {
    const int reason = errno;
    throw Error(ErrorKind::kDevice,
                concat("[comm] out of addresses for shared memory: got no ", bytes, " bytes: ", std::strerror(reason),
                       ". Raise this process's limits (ulimit -v; vm.max_map_count)."),
                reason);
  }
  data_ = static_cast<std::byte*>(begin);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

void Mapping::hide_from_children() const { madvise(data_, static_cast<std::size_t>(bytes_), MADV_DONTFORK); }

// --- This rank's memory

ShmMemory::ShmMemory(std::vector<Descriptor> sockets) : process_id_(getpid()), peers_(sockets.size()) {
  for (std::size_t rank = 0; rank < sockets.size(); ++rank) peers_[rank].socket = std::move(sockets[rank]);
}

Memory ShmMemory::allocate(std::int64_t bytes) {
  auto file = std::make_shared<Descriptor>(make_memory_file(bytes));
  Mapping mapping(*file, bytes, Mapping::Access::kWrite);
  std::byte* const data = mapping.data();
  std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) hear_from(peer);  // what they have freed
  own_.emplace(data, Segment{++num_segments_, std::move(mapping), std::move(file)});
  return Memory(data, [self = shared_from_this()](const std::byte* begin) { self->free(begin); });
}

void ShmMemory::free(const std::byte* data) noexcept {
  if (getpid() != process_id_) return;  // a forked child, which must not take it from its parent
  std::lock_guard lock(mutex_);
  const auto found = own_.find(data);
  const Segment segment = std::move(found->second);
  own_.erase(found);
  if (segment.file != nullptr) return;  // nobody knows it
  // Gives the pages back now: a peer may be slow to let go of its mapping.
  madvise(segment.mapping.data(), static_cast<std::size_t>(segment.mapping.bytes()), MADV_REMOVE);
  try {
    tell_all({Kind::kFreed, segment.number, 0}, nullptr);
  } catch (...) {  // no memory for a note: peers keep an empty mapping
  }
}

Place ShmMemory::locate(const void* data, std::int64_t bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  std::lock_guard lock(mutex_);
  auto found = own_.upper_bound(begin);
  if (found == own_.begin()) return {};
  Segment& segment = (--found)->second;
  const std::int64_t offset = begin - segment.mapping.data();
  if (offset + bytes > segment.mapping.bytes()) return {};
  if (segment.file != nullptr) {
    tell_all({Kind::kMemory, segment.number, segment.mapping.bytes()}, segment.file);
    segment.file = nullptr;
  }
  return {static_cast<std::uint64_t>(offset), segment.number};
}

// --- Peers

const std::byte* ShmMemory::map(int rank, const Place& place) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  auto found = peer.segments.find(place.segment);
  if (found == peer.segments.end()) {
    hear_from(peer);
    found = peer.segments.find(place.segment);
    if (found == peer.segments.end()) return nullptr;
  }
  return found->second.data() + place.offset;
}

Memory ShmMemory::share(std::int64_t bytes, std::span<const int> peers, std::uint32_t* number) {
  auto file = std::make_shared<Descriptor>(make_memory_file(bytes));
  Memory memory = own(Mapping(*file, bytes, Mapping::Access::kWrite));
  std::lock_guard lock(mutex_);
  *number = ++num_segments_;
  for (const int rank : peers) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (peer.socket) peer.outgoing.push_back({{Kind::kShared, *number, bytes}, file});
  }
  send_to_all();
  return memory;
}

Memory ShmMemory::adopt(int rank, std::uint32_t number) {
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  hear_from(peer);
  auto offered = peer.offered.extract(number);
  return offered.empty() ? nullptr : own(std::move(offered.mapped()));
}

void ShmMemory::poll() {
  if (!waiting_) return;
  std::lock_guard lock(mutex_);
  send_to_all();
}

void ShmMemory::close() {
  std::lock_guard lock(mutex_);
  peers_.clear();
}

void ShmMemory::tell_all(const Note& note, const std::shared_ptr<Descriptor>& file) {
  for (Peer& peer : peers_) {
    if (peer.socket) peer.outgoing.push_back({note, file});
  }
  send_to_all();
}

void ShmMemory::send_to_all() {
  waiting_ = false;
  for (Peer& peer : peers_) {
    send_to(peer);
    if (!peer.outgoing.empty()) waiting_ = true;
  }
}

void ShmMemory::send_to(Peer& peer) {
  while (!peer.outgoing.empty()) {
    const Outgoing& next = peer.outgoing.front();
    if (!send_with(peer.socket, &next.note, sizeof next.note, next.file.get())) {
      if (errno != EPIPE && errno != ECONNRESET) return;  // too much is under way: later
      peer.outgoing.clear();                              // it has ended
      peer.socket = {};
      return;
    }
    peer.outgoing.pop_front();
  }
}

void ShmMemory::hear_from(Peer& peer) {
  while (peer.socket && hear_one(peer)) continue;
}

bool ShmMemory::hear_one(Peer& peer) {
  Note note{};
  Descriptor file;
  if (!receive_with(peer.socket, &note, sizeof note, &file)) return false;  // nothing there, or it has ended
  if (note.kind == Kind::kFreed) {
    peer.segments.erase(note.segment);
    return true;
  }
  ZC_CHECK(file, kDevice, "[comm] no descriptor is left for a peer's memory: got none, expected one for a moment. ",
           "Raise the limit of open files (ulimit -n).");
  if (note.kind == Kind::kShared) {
    peer.offered.emplace(note.segment, Mapping(file, note.bytes, Mapping::Access::kWrite));
    return true;
  }
  Mapping mapping(file, note.bytes, Mapping::Access::kRead);
  mapping.hide_from_children();
  peer.segments.emplace(note.segment, std::move(mapping));
  return true;
}

}  // namespace zc::comm

#include "zc/comm/shm_transport.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <new>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "zc/base/error.h"
#include "zc/comm/call_header.h"
#include "zc/comm/shm_memory.h"
#include "zc/comm/shm_ring.h"

namespace zc::comm {
namespace {

// Longer messages are offered first, and go when their receiver is there: what nobody awaits is kept by the receiver.
constexpr std::int64_t kEagerBytes = 8192;
// Pieces of long messages go when there is room for so much, unless less is left.
constexpr std::int64_t kPieceBytes = 16384;
// Smaller memory is not worth a memory file of its own.
constexpr std::int64_t kSmallestSegment = std::int64_t{64} << 10;

struct Record {  // what stands in a ring; the data of messages and pieces follow
  enum class Kind : std::uint32_t { kMessage, kOffer, kReady, kPiece };
  Kind kind = Kind::kMessage;
  std::int32_t tag = 0;
  std::int64_t bytes = 0;
  std::uint64_t id = 0;  // of a long message, among those of its sender to its receiver
};

// What a Request points to.
struct Pending {
  int peer = 0;
  bool is_receive = false;
  bool done = false;
  int tag = 0;
  std::byte* data = nullptr;  // a send only reads it
  std::int64_t bytes = 0;
  std::int64_t moved = 0;
  std::uint64_t id = 0;  // of a long message
};

struct Unexpected {
  Record record;
  std::vector<std::byte> data;
};

struct Outgoing {
  Record record;
  Pending* send;  // null: a kReady
};

// What this rank has under way with one other.
struct Peer {
  ShmRing* in = nullptr;
  ShmRing* out = nullptr;
  Doorbell* doorbell = nullptr;
  std::vector<Pending*> receives;  // no message yet, in the order posted
  std::deque<Unexpected> unexpected;
  std::deque<Outgoing> outgoing;
  std::vector<Pending*> offered;    // sends
  std::vector<Pending*> streaming;  // sends that the peer is ready for
  std::vector<Pending*> arriving;   // receives of long messages
  std::uint64_t num_offered = 0;
};

template <class Match>
Pending* take_first(std::vector<Pending*>& from, Match match) {
  const auto found = std::ranges::find_if(from, match);
  if (found == from.end()) return nullptr;
  Pending* const pending = *found;
  from.erase(found);
  return pending;
}

// The rings to one rank, by sender, and its doorbell.
struct ShmInbox {
  explicit ShmInbox(std::byte* at) : memory(at) {}
  static std::int64_t bytes(int size) {
    return static_cast<std::int64_t>(kHead + sizeof(ShmRing) * static_cast<std::size_t>(size));
  }
  void construct(int size) {
    new (memory) Doorbell;
    for (int rank = 0; rank < size; ++rank)
      new (memory + kHead + sizeof(ShmRing) * static_cast<std::size_t>(rank)) ShmRing;
  }
  Doorbell* doorbell() const { return std::launder(reinterpret_cast<Doorbell*>(memory)); }
  ShmRing* ring(int rank) const {
    return std::launder(reinterpret_cast<ShmRing*>(memory + kHead + sizeof(ShmRing) * static_cast<std::size_t>(rank)));
  }

 private:
  static constexpr std::size_t kHead = 64;
  std::byte* memory;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(int rank, std::vector<Mapping> inboxes, std::vector<Descriptor> sockets)
      : rank_(rank),
        inboxes_(std::move(inboxes)),
        doorbell_(inbox(rank).doorbell()),
        peers_(inboxes_.size()),
        memory_(std::make_shared<ShmMemory>(std::move(sockets))) {
    for (int other = 0; other < size(); ++other) {
      Peer& peer = peer_of(other);
      peer.in = inbox(rank).ring(other);
      peer.out = inbox(other).ring(rank);
      peer.doorbell = inbox(other).doorbell();
    }
  }
  ~ShmTransport() override { memory_->close(); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(inboxes_.size()); }
  const char* name() const override { return "shm"; }
  Doorbell* doorbell() override { return doorbell_; }

  Request send(int rank, const void* data, std::int64_t bytes, int tag) override {
    Peer& peer = peer_of(rank);
    Record record{Record::Kind::kMessage, tag, bytes, 0};
    if (bytes <= kEagerBytes && peer.outgoing.empty() && has_room(peer, room_for(record))) {
      put(peer, record, data);
      announce(peer);
      return nullptr;
    }
    Pending* const send = make(rank, tag, const_cast<void*>(data), bytes);
    if (bytes > kEagerBytes) {
      record.kind = Record::Kind::kOffer;
      record.id = send->id = ++peer.num_offered;
    }
    peer.outgoing.push_back({record, send});
    push(peer);
    return send;
  }

  Request receive(int rank, void* data, std::int64_t bytes, int tag) override {
    Peer& peer = peer_of(rank);
    Pending* const receive = make(rank, tag, data, bytes);
    receive->is_receive = true;
    const auto found = std::ranges::find(peer.unexpected, tag, [](const Unexpected& each) { return each.record.tag; });
    if (found == peer.unexpected.end()) {
      peer.receives.push_back(receive);
      return receive;
    }
    const Unexpected sent = std::move(*found);
    peer.unexpected.erase(found);
    match(peer, *receive, sent.record);
    if (!sent.data.empty()) std::memcpy(data, sent.data.data(), sent.data.size());
    return receive;
  }

  bool test(Request& request) override {
    auto* const pending = static_cast<Pending*>(request);
    if (pending == nullptr) return true;
    if (!pending->done) {
      Peer& peer = peer_of(pending->peer);
      memory_->poll();
      drain(peer);
      push(peer);
    }
    if (!pending->done) return false;
    recycle(pending);
    request = nullptr;
    return true;
  }

  bool cancel(Request& request) noexcept override {
    auto* const pending = static_cast<Pending*>(request);
    request = nullptr;
    if (pending == nullptr) return true;
    Peer& peer = peer_of(pending->peer);
    std::erase_if(peer.outgoing, [pending](const Outgoing& each) { return each.send == pending; });
    for (auto* list : {&peer.receives, &peer.offered, &peer.streaming, &peer.arriving}) std::erase(*list, pending);
    recycle(pending);
    return true;
  }

  Memory allocate(std::int64_t bytes) override { return bytes < kSmallestSegment ? nullptr : memory_->allocate(bytes); }
  Place locate(const void* data, std::int64_t bytes) override { return memory_->locate(data, bytes); }
  const std::byte* map(int peer, const Place& place) override { return memory_->map(peer, place); }
  Memory share(std::int64_t bytes, std::span<const int> peers, std::uint32_t* number) override {
    return memory_->share(bytes, peers, number);
  }
  Memory adopt(int peer, std::uint32_t number) override { return memory_->adopt(peer, number); }

 private:
  ShmInbox inbox(int rank) const { return ShmInbox(inboxes_[static_cast<std::size_t>(rank)].data()); }
  Peer& peer_of(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  // --- Requests, used again.

  Pending* make(int peer, int tag, void* data, std::int64_t bytes) {
    if (unused_.empty()) unused_.push_back(&all_.emplace_back());
    Pending* const pending = unused_.back();
    unused_.pop_back();
    *pending = {.peer = peer, .tag = tag, .data = static_cast<std::byte*>(data), .bytes = bytes};
    return pending;
  }
  void recycle(Pending* pending) noexcept { unused_.push_back(pending); }

  // --- What goes out.

  static std::uint64_t room_for(const Record& record) {
    return sizeof record + (record.kind == Record::Kind::kMessage ? static_cast<std::uint64_t>(record.bytes) : 0);
  }

  static bool has_room(const Peer& peer, std::uint64_t bytes) {
    if (peer.out->room() >= bytes) return true;
    peer.out->want_room();
    return peer.out->room() >= bytes;
  }

  static void put(const Peer& peer, const Record& record, const void* data) {
    peer.out->put(&record, sizeof record);
    if (data != nullptr) peer.out->put(data, static_cast<std::size_t>(record.bytes));
  }

  static void announce(const Peer& peer) {
    peer.out->publish();
    peer.doorbell->ring();
  }

  void push(Peer& peer) {
    if (peer.outgoing.empty() && peer.streaming.empty()) return;
    bool any = false;
    for (; !peer.outgoing.empty() && has_room(peer, room_for(peer.outgoing.front().record)); any = true) {
      const auto [record, send] = peer.outgoing.front();
      peer.outgoing.pop_front();
      if (record.kind == Record::Kind::kMessage) {
        put(peer, record, send->data);
        send->done = true;
      } else {
        put(peer, record, nullptr);
        if (send != nullptr) peer.offered.push_back(send);
      }
    }
    if (peer.outgoing.empty()) any = push_pieces(peer) || any;
    if (any) announce(peer);
  }

  static bool push_pieces(Peer& peer) {
    bool any = false;
    while (!peer.streaming.empty()) {
      Pending& send = *peer.streaming.front();
      const std::int64_t left = send.bytes - send.moved;
      if (!has_room(peer, sizeof(Record) + static_cast<std::uint64_t>(std::min(left, kPieceBytes)))) break;
      const std::int64_t count = std::min(left, static_cast<std::int64_t>(peer.out->room() - sizeof(Record)));
      put(peer, {Record::Kind::kPiece, send.tag, count, send.id}, send.data + send.moved);
      send.moved += count;
      any = true;
      if (send.moved < send.bytes) continue;
      send.done = true;
      peer.streaming.erase(peer.streaming.begin());
    }
    return any;
  }

  // --- What comes in.

  void drain(Peer& peer) {
    if (peer.in->empty()) return;
    do {
      Record record;
      peer.in->get(&record, sizeof record);
      take(peer, record);
    } while (!peer.in->empty());
    if (peer.in->release()) peer.doorbell->ring();
  }

  void take(Peer& peer, const Record& record) {
    const auto has_tag = [&](const Pending* each) { return each->tag == record.tag; };
    const auto has_id = [&](const Pending* each) { return each->id == record.id; };
    const auto size = static_cast<std::size_t>(record.bytes);
    switch (record.kind) {
      case Record::Kind::kMessage:
      case Record::Kind::kOffer: {
        const bool whole = record.kind == Record::Kind::kMessage;
        if (Pending* const receive = take_first(peer.receives, has_tag)) {
          match(peer, *receive, record);
          if (whole) peer.in->get(receive->data, size);
        } else {
          Unexpected& sent = peer.unexpected.emplace_back(record, std::vector<std::byte>(whole ? size : 0));
          if (whole) peer.in->get(sent.data.data(), size);
        }
        break;
      }
      case Record::Kind::kReady:  // for a send that is given up nothing comes any more
        if (Pending* const send = take_first(peer.offered, has_id)) peer.streaming.push_back(send);
        break;
      case Record::Kind::kPiece: {
        const auto found = std::ranges::find_if(peer.arriving, has_id);
        if (found == peer.arriving.end()) {  // given up
          peer.in->skip(size);
          break;
        }
        Pending& receive = **found;
        peer.in->get(receive.data + receive.moved, size);
        receive.moved += record.bytes;
        if (receive.moved < receive.bytes) break;
        receive.done = true;
        peer.arriving.erase(found);
        break;
      }
    }
  }

  // A message, whose data the caller copies, or an offer.
  void match(Peer& peer, Pending& receive, const Record& record) {
    ZC_CHECK(record.bytes <= receive.bytes, kInternal, "[comm] a message does not fit: got ", record.bytes,
             " bytes, expected at most ", receive.bytes);
    if (record.kind == Record::Kind::kMessage) {
      receive.done = true;
      return;
    }
    receive.bytes = record.bytes;
    receive.id = record.id;
    peer.arriving.push_back(&receive);
    peer.outgoing.push_back({{Record::Kind::kReady, record.tag, 0, record.id}, nullptr});
    push(peer);
  }

  const int rank_;
  std::vector<Mapping> inboxes_;  // by rank
  Doorbell* const doorbell_;
  std::vector<Peer> peers_;
  std::shared_ptr<ShmMemory> memory_;
  std::deque<Pending> all_;
  std::vector<Pending*> unused_;
};

// --- Ranks find each other

struct Contact {            // travels as bytes between equal builds
  std::uint64_t name[2];    // of an abstract socket
  std::uint64_t secret;     // only a rank of this job knows it
  std::int64_t process_id;  // in the name, for whoever looks at a list of sockets
};

struct Hello {
  std::uint64_t secret;
  std::int32_t rank;
};

struct Outcome {
  char reason[200];  // empty: well
};

sockaddr_un address_of(const Contact& contact) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name =
      concat("zerocore-", contact.process_id, "-", std::hex, contact.name[0], "-", contact.name[1]);
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);  // the leading zero makes it abstract
  return address;
}

Descriptor make_socket() {
  return Descriptor::adopt([] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

std::string system_error() { return std::strerror(errno); }

// One rank on its way to the others. Each step is local and waits for nobody; a step may rely on all ranks having made
// the one before. They return why they failed, empty when they did not.
class Connecting {
 public:
  Connecting(int rank, int size) : rank_(rank), inboxes_(static_cast<std::size_t>(size)), sockets_(inboxes_.size()) {}

  std::string listen(Contact* own) {
    std::random_device random;
    const auto draw = [&random] { return (std::uint64_t{random()} << 32) | random(); };
    *own = own_ = {{draw(), draw()}, draw(), getpid()};
    const sockaddr_un address = address_of(own_);
    listener_ = make_socket();
    if (!listener_ || bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listener_.get(), SOMAXCONN) != 0) {
      return concat("it cannot listen: ", system_error());
    }
    file_ = make_memory_file(ShmInbox::bytes(size()));
    Mapping& inbox = inboxes_[static_cast<std::size_t>(rank_)];
    inbox = map_inbox(file_);
    ShmInbox(inbox.data()).construct(size());
    return {};
  }

  std::string connect(std::span<const Contact> all) {  // to those below; those above connect to this one
    for (int rank = 0; rank < rank_; ++rank) {
      const Contact& contact = all[static_cast<std::size_t>(rank)];
      const sockaddr_un address = address_of(contact);
      Descriptor& socket = sockets_[static_cast<std::size_t>(rank)];
      socket = make_socket();
      if (!socket || ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
        return concat("it cannot reach rank ", rank, ": ", system_error());
      }
      const std::string reason = greet(socket, contact.secret);
      if (!reason.empty()) return reason;
    }
    return {};
  }

  std::string accept(std::span<const Contact> all) {
    for (int missing = size() - 1 - rank_; missing > 0;) {
      Descriptor socket = Descriptor::adopt(
          [this] { return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
      if (!socket) return concat(missing, " ranks have not reached it: ", system_error());
      int rank = -1;
      if (!hear(socket, &rank) || rank <= rank_ || sockets_[static_cast<std::size_t>(rank)]) continue;  // a stranger
      const std::string reason = greet(socket, all[static_cast<std::size_t>(rank)].secret);
      if (!reason.empty()) return reason;
      sockets_[static_cast<std::size_t>(rank)] = std::move(socket);
      --missing;
    }
    return {};
  }

  std::string finish() {
    for (int below = 0; below < rank_; ++below) {
      int rank = -1;
      if (!hear(sockets_[static_cast<std::size_t>(below)], &rank) || rank != below) {
        return concat("rank ", below, " does not answer it");
      }
    }
    return {};
  }

  std::unique_ptr<Transport> transport() {
    return std::make_unique<ShmTransport>(rank_, std::move(inboxes_), std::move(sockets_));
  }

 private:
  int size() const { return static_cast<int>(inboxes_.size()); }

  Mapping map_inbox(const Descriptor& file) const {
    Mapping mapping(file, ShmInbox::bytes(size()), Mapping::Access::kWrite);
    mapping.hide_from_children();
    return mapping;
  }

  std::string greet(const Descriptor& socket, std::uint64_t secret) const {
    const Hello hello{secret, rank_};
    return send_with(socket, &hello, sizeof hello, &file_) ? "" : concat("it cannot send: ", system_error());
  }

  // Takes a rank's inbox; false: it is no rank of this job, or another user's.
  bool hear(const Descriptor& socket, int* rank) {
    ucred who{};
    socklen_t length = sizeof who;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || who.uid != getuid()) return false;
    Hello hello{};
    Descriptor file;
    if (!receive_with(socket, &hello, sizeof hello, &file) || !file || hello.secret != own_.secret || hello.rank < 0 ||
        hello.rank >= size()) {
      return false;
    }
    inboxes_[static_cast<std::size_t>(hello.rank)] = map_inbox(file);
    *rank = hello.rank;
    return true;
  }

  const int rank_;
  std::vector<Mapping> inboxes_;
  std::vector<Descriptor> sockets_;
  Contact own_{};
  Descriptor listener_;
  Descriptor file_;
};

}  // namespace

std::unique_ptr<Transport> connect_shm(int rank, int size, const Exchange& exchange, std::string* reason) {
  Connecting connecting(rank, size);
  const auto all_well = [&](const std::string& own_reason) {
    Outcome own{};
    copy_text(own_reason, own.reason);
    std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
    exchange(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(outcomes)));
    for (int each = 0; each < size; ++each) {
      const std::string_view text = text_of(outcomes[static_cast<std::size_t>(each)].reason);
      if (text.empty()) continue;
      *reason = concat("rank ", each, ": ", text);
      return false;
    }
    return true;
  };
  const auto attempt = [](const auto& step) -> std::string {
    try {
      return step();
    } catch (const std::exception& error) {
      return error.what();
    }
  };

  Contact own{};
  std::vector<Contact> all(static_cast<std::size_t>(size));
  const std::string listened = attempt([&] { return connecting.listen(&own); });
  exchange(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  if (!all_well(listened) || !all_well(attempt([&] { return connecting.connect(all); })) ||
      !all_well(attempt([&] { return connecting.accept(all); })) ||
      !all_well(attempt([&] { return connecting.finish(); }))) {
    return nullptr;
  }
  return connecting.transport();
}

}  // namespace zc::comm

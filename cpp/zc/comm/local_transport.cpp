#include "zc/comm/local_transport.h"

#include <atomic>
#include <cstring>
#include <list>
#include <mutex>

#include "zc/base/error.h"
#include "zc/comm/transport_communicator.h"

namespace zc::comm {
namespace {

// As MPI does: small messages are copied away at once, large ones wait for the receiver.
constexpr std::int64_t kEagerBytes = 4096;

struct Message {
  int tag = 0;
  const std::byte* source = nullptr;  // a send: what to copy
  std::byte* target = nullptr;        // a receive: where to
  std::int64_t bytes = 0;
  std::unique_ptr<std::byte[]> eager;  // owns `source` of a small send, which has no waiting sender
  std::atomic<bool> done{false};
};

// Everything in flight from one rank to another. Whoever comes second copies, under the lock.
class Mailbox {
 public:
  void send(std::shared_ptr<Message> message) {
    std::lock_guard lock(mutex_);
    if (auto receive = take(receives_, message->tag)) {
      deliver(*message, *receive);
      return;
    }
    if (message->bytes <= kEagerBytes) {
      auto copy = std::make_shared<Message>();
      copy->tag = message->tag;
      copy->bytes = message->bytes;
      copy->eager = std::make_unique<std::byte[]>(static_cast<std::size_t>(message->bytes));
      if (message->bytes > 0) std::memcpy(copy->eager.get(), message->source, static_cast<std::size_t>(message->bytes));
      copy->source = copy->eager.get();
      message->done = true;
      message = std::move(copy);
    }
    sends_.push_back(std::move(message));
  }

  void receive(std::shared_ptr<Message> message) {
    std::lock_guard lock(mutex_);
    if (auto sent = take(sends_, message->tag)) {
      deliver(*sent, *message);
    } else {
      receives_.push_back(std::move(message));
    }
  }

  void cancel(const Message* message) {
    std::lock_guard lock(mutex_);
    const auto is_it = [message](const auto& other) { return other.get() == message; };
    sends_.remove_if(is_it);
    receives_.remove_if(is_it);
  }

 private:
  using Queue = std::list<std::shared_ptr<Message>>;

  static std::shared_ptr<Message> take(Queue& queue, int tag) {
    for (auto it = queue.begin(); it != queue.end(); ++it) {
      if ((*it)->tag != tag) continue;
      auto message = std::move(*it);
      queue.erase(it);
      return message;
    }
    return nullptr;
  }

  static void deliver(Message& sent, Message& received) {
    ZC_CHECK(sent.bytes <= received.bytes, kInternal, "[comm] a message does not fit: got ", sent.bytes,
             " bytes, expected at most ", received.bytes);
    if (sent.bytes > 0) std::memcpy(received.target, sent.source, static_cast<std::size_t>(sent.bytes));
    sent.done = true;
    received.done = true;
  }

  std::mutex mutex_;
  Queue sends_, receives_;
};

struct Hub {
  explicit Hub(int num_ranks)
      : size(num_ranks), mailboxes(static_cast<std::size_t>(num_ranks) * static_cast<std::size_t>(num_ranks)) {}
  Mailbox& mailbox(int from, int to) { return mailboxes[static_cast<std::size_t>(from * size + to)]; }

  int size;
  std::vector<Mailbox> mailboxes;
  std::mutex mutex;
  std::vector<Memory> shared;  // by number - 1
};

// What a Request points to.
struct Ticket {
  Mailbox* mailbox;
  std::shared_ptr<Message> message;
};

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_->size; }
  const char* name() const override { return "local"; }

  Memory share(std::int64_t bytes, std::span<const int>, std::uint32_t* number) override {
    std::lock_guard lock(hub_->mutex);
    hub_->shared.push_back(allocate_host(bytes));
    *number = static_cast<std::uint32_t>(hub_->shared.size());
    return hub_->shared.back();
  }

  Memory adopt(int, std::uint32_t number) override {
    std::lock_guard lock(hub_->mutex);
    return hub_->shared[number - 1];
  }

  Request send(int peer, const void* data, std::int64_t bytes, int tag) override {
    auto message = std::make_shared<Message>();
    message->tag = tag;
    message->source = static_cast<const std::byte*>(data);
    message->bytes = bytes;
    Mailbox& mailbox = hub_->mailbox(rank_, peer);
    mailbox.send(message);
    return new Ticket{&mailbox, std::move(message)};
  }

  Request receive(int peer, void* data, std::int64_t bytes, int tag) override {
    auto message = std::make_shared<Message>();
    message->tag = tag;
    message->target = static_cast<std::byte*>(data);
    message->bytes = bytes;
    Mailbox& mailbox = hub_->mailbox(peer, rank_);
    mailbox.receive(message);
    return new Ticket{&mailbox, std::move(message)};
  }

  bool test(Request& request) override {
    auto* ticket = static_cast<Ticket*>(request);
    if (ticket == nullptr) return true;
    if (!ticket->message->done) return false;
    delete ticket;
    request = nullptr;
    return true;
  }

  bool cancel(Request& request) noexcept override {
    auto* ticket = static_cast<Ticket*>(request);
    if (ticket == nullptr) return true;
    ticket->mailbox->cancel(ticket->message.get());
    delete ticket;
    request = nullptr;
    return true;
  }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_local_transports(int size) {
  ZC_CHECK(size > 0, kConfig, "[comm] a local world without ranks: got size ", size, ", expected 1 or more");
  auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Transport>> ends;
  for (int rank = 0; rank < size; ++rank) ends.push_back(std::make_unique<LocalTransport>(hub, rank));
  return ends;
}

std::vector<std::shared_ptr<Communicator>> make_local_world(int size, Options options) {
  std::vector<std::shared_ptr<Communicator>> world;
  for (auto& end : make_local_transports(size)) world.push_back(make_transport_communicator(std::move(end), options));
  return world;
}

}  // namespace zc::comm
